"""The modes of modules, training or evaluation: each module has its own, and an evaluation gives it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["evaluating", "in_training", "num_evaluating"]


def in_training(model: Any) -> Any:
    """``model`` in the mode in which it is trained, as a loop puts it there before its first step.

    Parts that are in evaluation mode within a model in training mode stay so. A ``train`` of the model's own decides
    itself, and is called.
    """
    if isinstance(model, nn.Module) and (not model.training or type(model).train is not nn.Module.train):
        model.train()
    return model


def num_evaluating(modules: Iterable[nn.Module]) -> int:
    """How many of the modules, and of those in them, are in evaluation mode."""
    return sum(not part.training for part in _parts(modules))


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode for a while; afterwards every part of them has the mode that it had."""
    modules = list(modules)
    modes = [(part, part.training) for part in _parts(modules)]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _parts(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        yield from module.modules()
