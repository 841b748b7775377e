"""A reducer of a user's own: what ``compression.target`` makes is checked, and its errors name the target."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from runner.engine.transport.base import Channel, Gathering, Handle, Transport, TransportAround
from runner.engine.update.gradients import StageGradients
from runner.engine.update.reducer import PlainSum, Reducer, ReducerState
from runner.errors import Problem, RequestError, RunnerError
from runner.targets import call_named

__all__ = ["OwnReducer", "own_reducer", "try_reducer"]

T = TypeVar("T")

_PATH = "compression.target"
_METHODS = ("start", "settle", "state_dict", "load_state_dict")
_SHAPES = {"weight": (4, 4), "bias": (4,)}


def own_reducer(target: str, make: Callable[[StageGradients], Any], gradients: StageGradients) -> Reducer:
    """Make a user's reducer of one stage's gradients.

    Args:
        target: names the user's function or kind.
        make: makes the reducer.
        gradients: the stage's.

    Raises:
        RequestError: it cannot be made, or is no reducer.
    """
    made = call_named(_PATH, target, make, gradients)
    lacking = [name for name in _METHODS if not callable(getattr(made, name, None))]
    if lacking:
        why = f"It returned {_described(made)}, which has no {', '.join(lacking)}"
        raise RequestError([Problem(_PATH, target, "must return a Reducer (runner.engine.update.reducer)", why)])
    return (_OwnPlainSum if isinstance(made, PlainSum) else OwnReducer)(made, target)


def try_reducer(target: str, make: Callable[[StageGradients], Any]) -> None:
    """Make a user's reducer of two small tensors' gradients, before a rank is there to do it.

    Raises:
        RequestError: it cannot be made, or is no reducer.
    """
    weights = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in _SHAPES.items()}
    try:
        own_reducer(target, make, StageGradients(weights.items()))
    except RequestError as error:
        if not isinstance(error.__cause__, LookupError):  # it may look for what the model has; the ranks tell
            raise


class OwnReducer:
    """A :class:`runner.engine.update.reducer.Reducer` around a user's own.

    Args:
        inner: the user's.
        target: what names it in a request.
    """

    def __init__(self, inner: Reducer, target: str) -> None:
        self.inner, self._target = inner, target
        self._messages: _Messages | None = None

    def start(self, gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
        self._messages = _Messages(transport)
        handles = self.called("start", self.inner.start, gradients, self._messages, group)
        are_some = isinstance(handles, Sequence) and all(callable(getattr(each, "wait", None)) for each in handles)
        if not are_some:
            raise self._refused("must return from start a list of handles, which have wait", handles)
        return [_OwnHandle(self, each) for each in handles]

    def settle(self, applied: bool) -> None:
        self.called("settle", self.inner.settle, applied)

    def state_dict(self) -> ReducerState:
        state = self.called("state_dict", self.inner.state_dict)
        if not _is_state(state):
            raise self._refused("must return from state_dict the tensors of each parameter by their keys", state)
        return state

    def load_state_dict(self, state: ReducerState) -> None:
        self.called("load_state_dict", self.inner.load_state_dict, state)

    def called(self, name: str, method: Callable[..., T], *args: Any) -> T:
        """What a method of the user's returns.

        Raises:
            RequestError: it raised an error of its own: neither one of a message between ranks, which tells of another
                rank, nor one of memory.
        """
        try:
            return method(*args)
        except (RunnerError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            lost = self._messages.error if self._messages is not None else None
            if (lost is not None and (lost is error or lost is error.__cause__)) or "allocate memory" in str(error):
                raise
            frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is this one
            where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
            why = f"Its {name} raised {type(error).__name__}: {error}{where}"
            raise RequestError([Problem(_PATH, self._target, "must run in every step", why)]) from error

    def _refused(self, rule: str, returned: object) -> RequestError:
        return RequestError([Problem(_PATH, self._target, rule, f"It returned {_described(returned)}")])


class _OwnPlainSum(OwnReducer, PlainSum):
    """A user's plain sum, of which holders tell each other what was reached."""


class _OwnHandle:
    """A :class:`Handle` around a user's own, which may do a part of the arithmetic when it is waited for."""

    def __init__(self, reducer: OwnReducer, inner: Handle) -> None:
        self._reducer, self._inner = reducer, inner

    def wait(self) -> object:
        return self._reducer.called("handle", self._inner.wait)

    def is_completed(self) -> bool:
        return self._inner.is_completed()


class _Messages(TransportAround):
    """A transport that keeps the error of a message, as one that a rank which has ended causes in the others."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.error: Exception | None = None

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        with self.keeping():
            return _Message(self, super().send(tensor, peer, channel))

    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        with self.keeping():
            return _Message(self, super().receive(buffer, peer, channel))

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Handle:
        with self.keeping():
            return _Message(self, super().all_reduce(tensor, group))

    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Gathering:
        with self.keeping():
            return _Parts(self, super().start_all_gather(tensor, group))

    def all_gather(self, tensor: Tensor, group: Sequence[int]) -> list[Tensor]:
        with self.keeping():
            return super().all_gather(tensor, group)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the error of a message that is raised in the block; one of another type is about its arguments."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            self.error = error
            raise


class _Message:
    """A :class:`Handle` whose error is kept."""

    def __init__(self, messages: _Messages, inner: Handle) -> None:
        self._messages, self._inner = messages, inner

    def wait(self) -> object:
        with self._messages.keeping():
            return self._inner.wait()

    def is_completed(self) -> bool:
        return self._inner.is_completed()


class _Parts:
    """A :class:`Gathering` whose error is kept."""

    def __init__(self, messages: _Messages, inner: Gathering) -> None:
        self._messages, self._inner = messages, inner

    def wait(self) -> list[Tensor]:
        with self._messages.keeping():
            return self._inner.wait()


def _is_state(state: object) -> bool:
    if not isinstance(state, Mapping):
        return False
    return all(
        isinstance(entries, Mapping) and all(isinstance(each, Tensor) for each in entries.values())
        for entries in state.values()
    )


def _described(value: object) -> str:
    return "None" if value is None else f"a value of the class {type(value).__name__}"
