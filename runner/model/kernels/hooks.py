"""Which forward hooks a trace of a layer holds.

A hook that returns something computes, and so do those of ``torch.nn.utils``, which set a weight: their operators are
in the trace. A hook that returns nothing is there for what it does besides, which only its own calls do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["seeing_silent_hooks", "without_own_hooks"]


_SILENT = threading.local()  # what hooks refer to themselves is put back after a run that is a trial


@contextmanager
def seeing_silent_hooks(module: nn.Module) -> Iterator[list[str]]:
    """The kinds of the modules inside a module whose forward hooks return nothing when they run in the block."""
    found = _SILENT.kinds = []
    replaced: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for inner in module.modules():
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks) if inner is not module else ():
            own = {key: hook for key, hook in hooks.items() if not _is_of_torch(hook)}
            replaced.append((hooks, own))
            hooks.update({key: _noting(hook, type(inner).__name__) for key, hook in own.items()})
    try:
        yield found
    finally:
        for hooks, own in replaced:
            hooks.update(own)


@contextmanager
def without_own_hooks(module: nn.Module) -> Iterator[None]:
    """The block, in which a module runs without its own hooks: they run around its trace, too."""
    kept = [(hooks, dict(hooks)) for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    try:
        for hooks, own in kept:
            for key, hook in own.items():
                if not _is_of_torch(hook):
                    del hooks[key]
        yield
    finally:
        for hooks, own in kept:
            hooks.clear()
            hooks.update(own)


def _noting(hook: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        made = hook(*args, **kwargs)
        if made is None:
            _SILENT.kinds.append(kind)
        return made

    return noting


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.nn.utils.")
