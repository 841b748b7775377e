"""Tells errors of code that decides by the values of tensors, where tensors have none."""

from __future__ import annotations

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from runner.model.targets import users_line

__all__ = ["by_value"]

_ERRORS = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


def by_value(error: BaseException) -> str | None:
    """What to say of an error of fake tensors, with the user's line that asks for a value; None for other errors."""
    line = users_line(error) if isinstance(error, _ERRORS) else None
    if line is None:
        return None
    return f"{line} asks for the values of tensors, which a trace does not have; torch.where takes both sides of an if"
