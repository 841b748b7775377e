"""Tells errors of code that decides by the values of tensors, where tensors have none."""

from __future__ import annotations

from runner.model.targets import users_line

__all__ = ["by_value"]


def by_value(error: BaseException) -> str | None:
    """What to say of an error of fake tensors, with the user's line that asks for a value; None for other errors.

    The operators of a model that has been traced stand in no line of its code.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # imports a whole compiler

    kinds = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
    if not isinstance(error, kinds):
        return None
    line = users_line(error)
    if line is None:
        return "it asks for values of tensors, or for sizes that follow from them, as of x[mask], before there are any"
    return f"{line} asks for the values of tensors, which a trace does not have; torch.where takes both sides of an if"
