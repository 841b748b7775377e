"""The additions of a run to the forwards and backwards of its stages, each as a separate object.

A :class:`Work` wraps the forward and the backward of one stage and micro-batch. :class:`Works` composes several in
order: the first one is outermost.
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
"""A context that does nothing."""


class Place(NamedTuple):
    """One stage and one micro-batch of a window.

    Args:
        window: the micro-batch's window.
        stage: index of the stage.
        microbatch: number of the micro-batch in actions.
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
        """The number of samples of the micro-batch."""
        return self.window.size(self.microbatch)

    @property
    def is_stand_in(self) -> bool:
        """Whether the micro-batch is computed on one sample whose loss does not count."""
        return self.number in self.window.stand_ins


class Work(Protocol):
    """One addition to forwards and backwards."""

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        """Return the context in which a forward runs.

        Args:
            place: the stage and micro-batch.
            value: the stage's input.
            keeps: whether the graph is kept for the backward; otherwise a recomputation will make it, or there is none.
        """
        ...

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        """Return the context in which a backward runs, or its first part if it is split."""
        ...


class Filler(Work, Protocol):
    """Work of an optimizer that has its own actions in the schedule, in the time in which ranks would be idle."""

    def seeing(self, stage: int, microbatch: int) -> AbstractContextManager[Any]:
        """Return the context of a stage's forward whose graph is kept; its backward may run at any later time."""
        ...

    def begin(self, window: int) -> None:
        """Begin a step, which has the number ``window`` in the schedule's repetition."""
        ...

    def do(self, action: Action, timeline: Timeline) -> None:
        """Do one of its actions."""
        ...

    def settle(self) -> None:
        """Finish work that has begun, and put the results where checkpoints find them."""
        ...


class Works:
    """All additions of a run, in the order in which they are entered."""

    def __init__(self, works: Sequence[Work] = ()) -> None:
        self.all = tuple(works)

    def __str__(self) -> str:
        """The order of the additions, outermost first: ``versioned(lent(plain))``."""
        names = [type(work).__name__.lower() for work in self.all]
        return "(".join([*names, "plain"]) + ")" * len(names)

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        """Return the context of all additions for a forward."""
        return _all(work.forward(place, value, keeps=keeps) for work in self.all) if self.all else NOTHING

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        """Return the context of all additions for a backward, or for its first part if it is split."""
        return _all(work.backward(place) for work in self.all) if self.all else NOTHING


@contextmanager
def _all(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
