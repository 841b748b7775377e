"""Small functions that check what a test knows of a value, and thereby tell it to the type checker."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Value = TypeVar("Value")


def present(value: Value | None) -> Value:
    """A value that must be there."""
    assert value is not None
    return value


def gradient(parameter: Tensor) -> Tensor:
    """The gradient of a parameter that must have one."""
    return present(parameter.grad)
