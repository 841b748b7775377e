"""What a run adds to the forwards and backwards of its stages, each as an object of its own.

A :class:`Work` stands around one stage's forward and backward of one micro-batch. Several compose in one order, that of
:class:`Works`: the first stands outermost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

from runner.engine.measure.timeline import Timeline
from runner.engine.window import Window
from runner.schedule.values import Action

__all__ = ["NOTHING", "Filler", "Place", "Work", "Works"]

NOTHING: AbstractContextManager[Any] = nullcontext()
"""The context of what adds nothing."""


class Place(NamedTuple):
    """One stage and micro-batch under way.

    Args:
        window: the micro-batch's.
        stage: of the model.
        microbatch: the number that actions give it.
    """

    window: Window
    stage: int
    microbatch: int

    @property
    def number(self) -> int:
        """The micro-batch's number in its window, from 0."""
        return self.window.index(self.microbatch)

    @property
    def samples(self) -> int:
        """Samples of the micro-batch."""
        return self.window.size(self.microbatch)

    @property
    def is_stand_in(self) -> bool:
        """Whether it is computed on one sample whose loss does not count."""
        return self.number in self.window.stand_ins


class Work(Protocol):
    """One addition."""

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        """Stands around a forward.

        Args:
            place: what runs.
            value: the stage's input.
            keeps: the graph is kept for the backward; otherwise a recomputation will make it, or there is none.
        """
        ...

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        """Stands around a backward, or around its first part where it is split."""
        ...


class Filler(Work, Protocol):
    """Work of an optimizer's that has its own actions in the schedule, in the time that ranks would idle."""

    def seeing(self, stage: int, microbatch: int) -> AbstractContextManager[Any]:
        """Within it, a stage's forward runs whose graph is kept; its backward may run any time later."""
        ...

    def begin(self, window: int) -> None:
        """A step begins, by its number in the schedule's repetition."""
        ...

    def do(self, action: Action, timeline: Timeline) -> None:
        """One of its actions."""
        ...

    def settle(self) -> None:
        """Do what is under way, and put the results where checkpoints find them."""
        ...


class Works:
    """All additions of a run; their order is the order in which they are entered."""

    def __init__(self, works: Sequence[Work] = ()) -> None:
        self.all = tuple(works)

    def __str__(self) -> str:
        """The order, outermost first: ``versioned(lent(plain))``."""
        names = [type(work).__name__.lower() for work in self.all]
        return "(".join([*names, "plain"]) + ")" * len(names)

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        """Around a forward."""
        return _all(work.forward(place, value, keeps=keeps) for work in self.all) if self.all else NOTHING

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        """Around a backward, or around its first part where it is split."""
        return _all(work.backward(place) for work in self.all) if self.all else NOTHING


@contextmanager
def _all(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
