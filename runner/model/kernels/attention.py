"""By what means of torch attention is computed, wherever a model calls ``scaled_dot_product_attention``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.backends import cuda
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from runner.errors import Problem, RequestError

__all__ = ["Attention"]

_SWITCHES: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}
"""Whether torch may take this means, on any device, and what says it."""
_OPERATORS = {"eager": ("math",), "fused": ("flash", "efficient", "cudnn")}
_ATTENTION = (scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
_NONE = "No available kernel"  # how torch begins to say it


class Attention:
    """Computes attention in layers as asked.

    Args:
        attention: ``eager`` or ``fused``.

    Attributes:
        found: whether a layer has called attention so far.
    """

    def __init__(self, attention: str) -> None:
        self.found = False
        self._attention = attention

    def around(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function, a layer, with this attention."""

        def run(value: Any) -> Any:
            with ExitStack() as held:
                held.enter_context(self._chosen())
                if not self.found:
                    held.enter_context(_Seeing(self))
                try:
                    return function(value)
                except RuntimeError as error:
                    if not str(error).startswith(_NONE):
                        raise
                    rule = "must have a fused operator for every attention of the model"
                    why = "Torch has none for one here: on a CPU there is none with dropout, or for 16 bits with a mask"
                    raise RequestError([Problem("kernels.attention", "fused", rule, why, "kernels=none")]) from error

        return run

    def _chosen(self) -> AbstractContextManager[None]:
        return _only(_OPERATORS[self._attention])


class _Choice:
    """Torch's choice is one for all threads of a process: the first that computes limits it, and the last frees it.

    So it cannot be torch's own context, which a thread must leave that has entered it.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, dict[str, bool]()

    @contextmanager
    def limited(self, operators: Collection[str]) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._before = {name: is_on() for name, (is_on, _) in _SWITCHES.items()}
                _switch({name: name in operators for name in _SWITCHES})
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    _switch(self._before)


def _switch(wanted: Mapping[str, bool]) -> None:
    for name, (_, switch) in _SWITCHES.items():
        switch(wanted[name])


_only = _Choice().limited


class _Seeing(TorchFunctionMode):
    """Notes a call of attention."""

    def __init__(self, kernels: Attention) -> None:
        super().__init__()
        self._kernels = kernels

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        without_weights = func is multi_head_attention_forward and not kwargs.get("need_weights", True)
        self._kernels.found |= func in _ATTENTION or without_weights  # what that calls itself is not seen
        return func(*args, **kwargs)
