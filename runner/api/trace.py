"""Layers of an ordinary LightningModule in a user's script: its forward is traced and cut, as ``runner train`` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from runner.errors import Problem, RequestError
from runner.model.boundary import map_tensors
from runner.model.layers import LayerSource
from runner.model.load import segments_of
from runner.model.own_methods import brings
from runner.model.traced.operators import trace

__all__ = ["traced_layers", "traced_step_layers", "training_loaders"]

_SAMPLES = 3  # more than two, because torch treats sizes of 0 and 1 as constants


def traced_layers(model: pl.LightningModule, stages: int) -> list[LayerSource]:
    """The segments of a module's forward, at least one for each stage.

    It is traced on some samples of its ``example_input_array`` or, without one, of the first training batch.

    Args:
        model: a module with a forward.
        stages: the number of stages of the pipeline.

    Raises:
        RequestError: the module has no forward, there is no example, or it cannot be traced.
    """
    name = type(model).__name__
    if not brings(model, "forward"):
        why = "A pipeline cuts a model between layers: def layers(self) returns them in order, or forward(x) is traced"
        raise RequestError([Problem(name, None, "must have a method layers() or forward()", why)])
    given = _some(_example(model, name))
    with torch.random.fork_rng(devices=[]):
        return segments_of(model, trace(model, given, name), None, wanted=stages - 1)


def traced_step_layers(model: pl.LightningModule, stages: int) -> tuple[list[LayerSource], Any]:
    """The segments of a module's ``training_step``, and the loss that it computes of their output and the target.

    It is traced on some samples of the first training batch.

    Args:
        model: a module with a ``training_step``.
        stages: the number of stages of the pipeline.

    Raises:
        RequestError: the batch is no pair of an input and a target, or the step cannot be traced.
    """
    from runner.model.traced.step import traced_step

    name = type(model).__name__
    batch = _first_batch(model)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        why = f"{name} has no loss(output, target), so that its training_step is traced with a batch of both"
        rule = "must give batches (input, target)"
        raise RequestError([Problem("train_dataloaders", type(batch).__name__, rule, why)])
    with torch.random.fork_rng(devices=[]):
        programs, loss = traced_step(model, (_some(batch[0]), _some(batch[1])), name)
        return segments_of(model, programs, None, wanted=stages - 1), loss


def _example(model: pl.LightningModule, name: str) -> Any:
    """Inputs of the model: those that it names itself, or those of the first training batch."""
    if model.example_input_array is not None:
        return model.example_input_array
    if not model.trainer.fit_loop._data_source.is_defined():
        why = "It has no layers(), and its forward is traced on an example before anything else runs"
        fix = "self.example_input_array = torch.randn(4, 8)"
        raise RequestError([Problem(f"{name}.example_input_array", None, "must be set here", why, fix)])
    batch = _first_batch(model)
    return batch[0] if isinstance(batch, tuple | list) else batch


def training_loaders(model: pl.LightningModule) -> list[Any]:
    """The loaders of a fit as the user gives them, before Lightning puts its own samplers into them."""
    with _random_state_kept():
        return list(CombinedLoader(model.trainer.fit_loop._data_source.dataloader()).flattened)


def _first_batch(model: pl.LightningModule) -> Any:
    with _random_state_kept():
        return next(iter(model.trainer.fit_loop._data_source.dataloader()))


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Draw nothing from the generators that the run draws from: a loader takes the seed of its order from them."""
    with torch.random.fork_rng(devices=[]):
        yield


def _some(inputs: Any) -> Any:
    """So many samples of a batch, or of repetitions of one that has fewer."""

    def of(tensor: Tensor) -> Tensor:
        return tensor.repeat(_SAMPLES, *[1] * (tensor.dim() - 1))[:_SAMPLES] if tensor.dim() else tensor

    return map_tensors(of, inputs)
