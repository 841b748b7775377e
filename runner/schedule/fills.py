"""Work that fills bubbles: what a schedule must know of it, whatever it does.

A guest's work, such as that of an optimizer, has actions of its own in a schedule, done by a rank while it would idle.
Each such action is of a *kind*, which its :class:`Filling` declares beside the generator that places it. All other
parts of the house read what they need from there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["FILL_NAME", "FillKind", "Filling", "Shown"]

FILL_NAME = re.compile("(?!(?:(?:SEND|RECV)_[FBRS]|OUT|IN|REDUCE|STEP|FILL|[FBIWR]+)(?![A-Z_]))[A-Z][A-Z_]*[A-Z]")
"""The names that a kind may have: two capitals or more, and underscores between, but no name of an op."""


class Shown(StrEnum):
    """The part of its own micro-batch that a fill waits for."""

    FORWARD = "forward"
    GRADIENT = "gradient"  # the gradient of the weights: the end of the backward, of W where that is split


@dataclass(frozen=True, slots=True)
class FillKind:
    """One kind of action that fills bubbles. It is of one micro-batch and stage, or of a stage alone.

    Args:
        name: as actions print it: capitals and underscores, two characters at least.
        cost: the key of ``cost.*`` that says how long one takes.
        default_cost: where that key is not given; in the unit of the other costs.
        character: what the time grid shows for it.
        color: of its cells in drawings, as ``#rrggbb``.
        label: what it is, for the legend of drawings.
        shown_by: it is of a micro-batch, and waits for this; None: it is of a stage.
        follows: the kind, by name, of which all of its stage must be done before; None: it waits for no other kind.
        rule: what the checker says of one with a micro-batch that it must not have, or without one.

    Raises:
        ValueError: no action could print that name.
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
            raise ValueError(f"{self.name}: a kind's name is two capitals or more, and no op's")

    @property
    def of_microbatch(self) -> bool:
        """Whether each is of one micro-batch; otherwise it is of a stage."""
        return self.shown_by is not None


@dataclass(frozen=True, slots=True)
class Filling:
    """All work of one guest in a schedule.

    It is that of the first window's micro-batches, done once within all windows: each kind of a micro-batch once for
    each of them, each kind of a stage once.

    Args:
        work: whose work it is, for sentences like "needs ..." and "with ...'s work".
        key: the same in documents: the share of time ``with_<key>``; an optimizer names the work that it does by it.
        brings: what is new once all of it is done, in the plural.
        legend: what the time grid's characters mean.
        optimizer: the option that does the work, and that a request must choose.
        description: what fills the bubbles, in a sentence.
        kinds: in the order of their priority.
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
        """The keys of ``cost.*`` that it reads, each once."""
        return tuple(dict.fromkeys(kind.cost for kind in self.kinds))

    def kind(self, name: str | None) -> FillKind:
        """The kind of an action.

        Raises:
            KeyError: there is none of that name.
        """
        for kind in self.kinds:
            if kind.name == name:
                return kind
        raise KeyError(f"{self.work} has no work {name}")
