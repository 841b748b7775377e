"""Finds out whether a model computes the same in training as in evaluation, so that one trace stands for both.

Both modes run on fake tensors, and every call of torch's functions is noted: the function, its arguments, and which
tensors they are. A difference between the modes shows as another call or another argument, such as the ``training`` of
a dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.overrides import TorchFunctionMode

from runner.model.boundary import call_arguments
from runner.model.modes import evaluating
from runner.model.traced.structure import described

__all__ = ["computes_alike"]


def computes_alike(model: nn.Module, inputs: Any) -> bool:
    """Whether training and evaluation of a model on fake tensors make the same calls.

    It is false where that is not known: for a model of real tensors, for one that cannot run on fake tensors, and where
    an argument can only be told by its identity.

    Args:
        model: the model, in the mode in which it is trained.
        inputs: a batch in the form that the model takes.
    """
    if detect_fake_mode(list(model.parameters())) is None:
        return False
    try:
        training = _calls_of(model, inputs)
        with evaluating([model]):
            return training == _calls_of(model, inputs)
    except Exception:  # the export says what is wrong with the model
        return False


def _calls_of(model: nn.Module, inputs: Any) -> list[Hashable]:
    args, kwargs = call_arguments(inputs)
    noted = _Calls()
    with noted:
        noted.note(model(*args, **kwargs))
    return noted.calls


class _Calls(TorchFunctionMode):
    """Notes the calls of torch's functions. Tensors that they return are numbered, all others are told by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Hashable] = []
        self._numbers: dict[int, int] = {}
        self._held: list[Tensor] = []  # a number is that of a tensor's place in memory, so that none may be freed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = func, self._described(args), self._described(kwargs or {})
        made = func(*args, **(kwargs or {}))
        self._number(made)
        self.calls.append((given, self._described(made)))
        return made

    def note(self, output: Any) -> None:
        """Note what the model returns."""
        self.calls.append(self._described(output))

    def _number(self, made: Any) -> None:
        if isinstance(made, tuple | list):
            for each in made:
                self._number(each)
        elif isinstance(made, Tensor) and not isinstance(made, nn.Parameter):
            self._held.append(made)
            self._numbers.setdefault(id(made), len(self._numbers))

    def _described(self, value: Any) -> Hashable:
        return described(value, self._known)

    def _known(self, value: Any) -> Hashable | None:
        number = self._numbers.get(id(value)) if isinstance(value, Tensor) else None
        return None if number is None else (Tensor, number)
