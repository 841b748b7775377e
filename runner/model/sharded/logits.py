"""The loss of logits of which each rank has a part of the vocabulary: no rank puts them together for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from runner.config.schema import LossConfig
from runner.model.data import LossFunction
from runner.model.sharded.plan import Division
from runner.model.sharded.vocabulary import vocabulary_cross_entropy
from runner.model.sharded.wrap import ShardedModule

__all__ = ["LogitsWatch", "is_by_parts", "loss_of_parts"]

_BY_PARTS = ("runner.zoo.losses:cross_entropy", "runner.zoo.losses:token_cross_entropy")
_IGNORED = -100  # torch's own


def is_by_parts(config: LossConfig) -> bool:
    """Whether a loss can be computed by parts of the vocabulary: a cross-entropy whose classes all count alike."""
    return config.target in _BY_PARTS and set(config.kwargs) <= {"ignore_index"}


def loss_of_parts(loss: LossFunction, config: LossConfig, division: Division) -> LossFunction:
    """A loss that takes a rank's part of the logits, too, as layers return it in training.

    Args:
        loss: takes whole logits.
        config: says what it is.
        division: knows the vocabulary when the layer that makes the logits has been built.
    """
    ignored = config.kwargs.get("ignore_index", _IGNORED)

    def of_parts(output: Any, target: Any) -> Any:
        if output.shape[-1] == division.vocabulary:
            return loss(output, target)
        return vocabulary_cross_entropy(output, target, division.group.name, division.vocabulary, ignored)

    return of_parts


class LogitsWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees, while a model runs, which of its layers' gathered logits nothing reads.

    Args:
        modules: the model's layers, with their names.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[tuple[str, Tensor, int]] = []
        self._read: set[int] = set()
        self._hooks = ExitStack()
        for name, module in modules:
            if isinstance(module, ShardedModule) and getattr(module, "gathered", None) is not None:
                self._hooks.callback(module.register_forward_hook(self._note(name)).remove)

    def _note(self, name: str) -> Any:
        def note(module: nn.Module, given: Any, made: Tensor) -> None:
            self._read.discard(id(made))  # of a tensor that is gone and was at this address before
            self._made.append((name, made, made._version))

        return note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._read.update(id(each) for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        return func(*args, **(kwargs or {}))

    def unread(self, output: Any) -> str:
        """The name of the layer that has made an output which nothing else reads, or an empty text."""
        self._hooks.close()
        found: Iterator[str] = (
            name
            for name, made, version in self._made
            if made is output and made._version == version and id(made) not in self._read
        )
        return next(found, "") if len(self._made) == 1 else ""
