"""What a model does around its layers: a list of them leaves it out."""

from __future__ import annotations

from typing import Any

from torch import nn

from runner.errors import Problem

__all__ = ["is_plain_chain", "problems_around"]

_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}


def is_plain_chain(model: Any) -> bool:
    """Whether a model is an ``nn.Sequential`` that runs its children one after the other, and does nothing else."""
    return (
        isinstance(model, nn.Sequential)
        and type(model).forward is nn.Sequential.forward
        and "forward" not in vars(model)  # set on the object
        and not _around(model)
    )


def problems_around(model: Any, target: str) -> list[Problem]:
    """Why a model that lists its layers does more than these do.

    Args:
        model: has ``layers()``.
        target: the model's function, for the messages.
    """
    found = _around(model) if isinstance(model, nn.Module) else ""
    if not found:
        return []
    rule = "must do nothing around its layers()"
    return [
        Problem(
            "model.target", target, rule, f"It has {found}, which nothing would call. One of its layers may have it"
        )
    ]


def _around(model: nn.Module) -> str:
    """What acts when the model is called, beside its forward; empty if nothing does."""
    if type(model).__call__ is not nn.Module.__call__:
        return "a __call__ of its own"
    return next((text for name, text in _HOOKS.items() if getattr(model, name)), "")
