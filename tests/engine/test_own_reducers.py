"""Reducers of a user's own: what their maker returns is checked, and what their methods raise names the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.engine.transport.base import Handle, Transport, TransportAround
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.update.gradients import StageGradients
from runner.engine.update.own_reducer import OwnReducer, own_reducer, try_reducer
from runner.engine.update.reducer import PlainSum
from runner.errors import RequestError

TARGET = "mine:sums"


class Sums:
    """Plain sums, of which one method does what a test says."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.start: Callable[..., Any] = lambda gradients, transport, group: gradients.start_sum(transport, group)
        self.settle: Callable[..., Any] = lambda applied: None
        self.state_dict: Callable[..., Any] = dict
        self.load_state_dict: Callable[..., Any] = lambda state: None
        vars(self).update(methods)


class Raising:
    """A handle that does its arithmetic when it is waited for, in vain."""

    def wait(self) -> None:
        raise ValueError("no room")


def raising(*_: object) -> Any:
    raise ValueError("no more")


def gradients_of_two() -> StageGradients:
    return StageGradients([("w", torch.nn.Parameter(torch.zeros(2)))])


def a_step(reducer: Any, transport: Transport) -> list[float]:
    gradients = gradients_of_two()
    gradients.reducer = own_reducer(TARGET, lambda _: reducer, gradients)
    gradients.flats[0].fill_(1.0 + transport.rank)
    for handle in gradients.reducer.start(gradients, transport, (0, 1)):
        handle.wait()
    found: list[float] = gradients.flats[0].tolist()
    gradients.reducer.settle(applied=True)
    gradients.reducer.load_state_dict(gradients.reducer.state_dict())
    return found


@pytest.mark.parametrize("reducer", [Sums(), PlainSum()])
def test_a_good_one_sums_as_by_itself(reducer: Any) -> None:
    assert run_ranks(2, lambda transport: a_step(reducer, transport)) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"start": raising}, r"must run in every step. Its start raised ValueError: no more \(test_own_reducers.py:"),
        ({"start": lambda *_: [3]}, "must return from start a list of handles, which have wait"),
        ({"start": lambda *_: None}, "must return from start a list of handles, which have wait. It returned None"),
        ({"start": lambda *_: [Raising()]}, "Its handle raised ValueError: no room"),
        ({"settle": raising}, "Its settle raised ValueError"),
        ({"state_dict": raising}, "Its state_dict raised ValueError"),
        ({"state_dict": lambda: {"w": torch.zeros(2)}}, "must return from state_dict the tensors of each parameter"),
        ({"load_state_dict": raising}, "Its load_state_dict raised ValueError"),
    ],
)
def test_what_its_methods_do_wrong_names_the_target(methods: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=f"^compression.target = {TARGET}: .*{said}"):
        run_ranks(2, lambda transport: a_step(Sums(**methods), transport))


class Lost:
    """A message as torch's own are, whose error has no line of Python's: the other rank has ended."""

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")

    def is_completed(self) -> bool:
        return False


class LostTransport(TransportAround):
    """Every sum with other ranks is lost."""

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Handle:
        return Lost()


class Around:
    """A user's handle, which does nothing but wait for a message."""

    def __init__(self, message: Handle) -> None:
        self.message = message

    def wait(self) -> None:
        self.message.wait()


def summed_at_once(gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
    for handle in gradients.start_sum(transport, group):
        handle.wait()
    return []


def around(gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Around]:
    return [Around(handle) for handle in gradients.start_sum(transport, group)]


@pytest.mark.parametrize("methods", [{}, {"start": summed_at_once}, {"start": around}])
def test_an_error_of_a_message_stays_what_it_is(methods: dict[str, Any]) -> None:
    """It tells that another rank has ended, which has told why."""

    def run(transport: ThreadTransport) -> object:
        if not transport.rank:
            with pytest.raises(RuntimeError, match="^Connection closed by peer$"):
                a_step(Sums(**methods), LostTransport(transport))
        return None

    run_ranks(2, run)


def test_an_error_of_a_messages_arguments_is_the_reducers() -> None:
    def start(gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
        return [transport.all_reduce(None, group)]  # type: ignore[arg-type]  # what a user may do

    with pytest.raises(RequestError, match="Its start raised AttributeError: 'NoneType' object has no attribute"):
        run_ranks(2, lambda transport: a_step(Sums(start=start), transport))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_lack_of_memory_stays_what_it_is(error: Exception) -> None:
    def start(*_: object) -> Any:
        raise error

    with pytest.raises(type(error)):
        run_ranks(2, lambda transport: a_step(Sums(start=start), transport))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: 3, "must return a Reducer .* It returned a value of the class int, which has no start, settle"),
        (lambda _: None, "It returned None"),
        (raising, "must run with the arguments that it is given. Calling it raised ValueError: no more"),
    ],
)
def test_what_makes_none_is_refused_when_it_is_tried(make: Callable[[StageGradients], Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        try_reducer(TARGET, make)


def test_what_looks_for_a_weight_of_the_model_is_tried_by_the_ranks_alone() -> None:
    def make(gradients: StageGradients) -> Sums:
        places = {name: at for at, name in enumerate(gradients.names)}
        return Sums(settle=lambda applied, at=places["w"]: None)

    try_reducer(TARGET, make)
    assert isinstance(own_reducer(TARGET, make, gradients_of_two()), OwnReducer)


def test_a_plain_sum_of_a_users_is_still_one() -> None:
    """Only with plain sums do holders tell each other which weights a step has reached."""
    made = own_reducer(TARGET, lambda _: PlainSum(), gradients_of_two())
    assert isinstance(made, OwnReducer)
    assert isinstance(made, PlainSum)
