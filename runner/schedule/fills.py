"""Describes work that fills bubbles, such as an optimizer's, for schedules, which need not know what it does.

Such work has its own actions in a schedule, called fills, which a rank does while it would be idle. Every fill has a
*kind*. A :class:`Filling` declares the kinds beside the generator that places them, and all other parts of the runner
read from there what they need to know of a kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["FILL_NAME", "FillKind", "Filling", "Shown"]

FILL_NAME = re.compile("(?!(?:(?:SEND|RECV)_[FBRS]|OUT|IN|REDUCE|STEP|FILL|[FBIWR]+)(?![A-Z_]))[A-Z][A-Z_]*[A-Z]")
"""The names that a kind may have: at least two capitals, with underscores between them, but not the name of an op."""


class Shown(StrEnum):
    """The part of its own micro-batch that a fill waits for."""

    FORWARD = "forward"
    GRADIENT = "gradient"  # the gradient of the weights: the end of the backward, of W where that is split


@dataclass(frozen=True, slots=True)
class FillKind:
    """One kind of fill. A fill is done for one micro-batch and stage, or for a stage alone.

    Args:
        name: the name that actions print: capitals and underscores, at least two characters.
        cost: the key of ``cost.*`` with the duration of one fill.
        default_cost: the duration if that key is not given, in the unit of the other costs.
        character: the character for it in the time grid.
        color: the colour of its cells in drawings, as ``#rrggbb``.
        label: its description in the legend of drawings.
        shown_by: the part of its micro-batch for which a fill waits; None if fills are done for a stage alone.
        follows: the name of a kind whose fills of the same stage must all be done before; None if there is none.
        rule: the checker's message for a fill with a wrong micro-batch, or without one.

    Raises:
        ValueError: no action can print this name.
    """

    name: str
    cost: str
    default_cost: float
    character: str
    color: str
    label: str
    shown_by: Shown | None = None
    follows: str | None = None
    rule: str = "a fill is of a micro-batch of the first window, or of a stage alone, as its kind says"

    def __post_init__(self) -> None:
        if not FILL_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name}: a kind's name must be at least two capitals, and must not be that of an op")

    @property
    def of_microbatch(self) -> bool:
        """Whether each fill is done for one micro-batch; otherwise it is done for a stage."""
        return self.shown_by is not None


@dataclass(frozen=True, slots=True)
class Filling:
    """All work that fills the bubbles of a schedule.

    It belongs to the micro-batches of the first window, and is done once within all windows of the schedule: kinds for
    a micro-batch once for each of these micro-batches and each stage, and kinds for a stage once for each stage.

    Args:
        work: the name of what does the work, for sentences like "needs ..." and "with ...'s work".
        key: its name in JSON documents, as in the share of time ``with_<key>``; an optimizer names its work by it.
        brings: the result that is new when all of the work is done, in the plural.
        legend: an explanation of the time grid's characters.
        optimizer: the option of the optimizer that does the work, which a request must choose.
        description: a description of what fills the bubbles, for sentences.
        kinds: the kinds of fills, in the order of their priority.
    """

    work: str
    key: str
    brings: str
    legend: str
    optimizer: str
    description: str
    kinds: tuple[FillKind, ...]

    @property
    def costs(self) -> tuple[str, ...]:
        """The keys of ``cost.*`` with the durations of its kinds, each once."""
        return tuple(dict.fromkeys(kind.cost for kind in self.kinds))

    def kind(self, name: str | None) -> FillKind:
        """The kind with this name, as an action's ``fill`` gives it.

        Raises:
            KeyError: there is no kind with this name.
        """
        for kind in self.kinds:
            if kind.name == name:
                return kind
        raise KeyError(f"{self.work} has no kind of work that is called {name}")
