"""Keeps outputs of chosen operators of a layer's first run, and gives them to a second run instead of running these.

A dispatch mode sees every operator of a run, below autograd: so the second run builds the same graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from runner.memory.solve.save_ops import SaveChoice
from runner.profiling.saved_scan import operator_name

__all__ = ["KeptOutputs"]

_Call = Callable[[], Any]


class KeptOutputs:
    """The kept outputs of one layer and one micro-batch.

    Args:
        layer: the layer's index, for messages.
        preset: a key of :data:`runner.memory.solve.save_ops.OPERATORS`.
    """

    def __init__(self, layer: int, preset: str) -> None:
        self._layer, self._preset = layer, preset
        self._outputs: deque[Any] = deque()

    def keeping(self) -> TorchDispatchMode:
        """The context of the first run."""
        return _Choosing(self._preset, self._keep)

    def giving(self) -> TorchDispatchMode:
        """The context of the second run, which uses up what is kept."""
        return _Choosing(self._preset, self._give)

    def _keep(self, call: _Call) -> Any:
        result = call()
        self._outputs.append(tree_map(_noted, result))
        return result

    def _give(self, call: _Call) -> Any:
        if not self._outputs:
            raise RuntimeError(f"layer {self._layer} has run more operators than in its first run: it must do the same")
        return tree_map(partial(_same, self._layer), self._outputs.popleft())


class _Choosing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base is not typed
    """Lets a function handle the operators of a preset."""

    def __init__(self, preset: str, handle: Callable[[_Call], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choice, self._handle = SaveChoice(preset), handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        return self._handle(call) if self._choice.keeps(operator_name(func)) else call()


class _Noted:
    """A tensor without its part of the graph, and its version."""

    def __init__(self, tensor: Tensor) -> None:
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self.tensor = tensor.detach()  # which shares the count of versions only with this key
        self.version = self.tensor._version


def _noted(value: Any) -> Any:
    return _Noted(value) if isinstance(value, Tensor) else value


def _same(layer: int, value: Any) -> Any:
    """The tensor that was noted, if it was not changed since."""
    if not isinstance(value, _Noted):
        return value
    if value.tensor._version != value.version:
        raise RuntimeError(
            f"layer {layer} changes the output of an operator in place that was kept for its second run: use operators "
            "that are not in place, or another activation_checkpoint"
        )
    return value.tensor
