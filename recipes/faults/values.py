"""A fault, as a value that can be written down and injected again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

__all__ = ["Chain", "Fault"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        kind: name of a kind, see :mod:`runner.recipes.faults.kinds`.
        rank: the rank in which it is injected, or whose loader worker; 0 for other processes.
        place: name of a place, see :mod:`runner.recipes.faults.places`.
        count: which time the place is reached, from 1.
    """

    kind: str
    rank: int
    place: str
    count: int

    def __str__(self) -> str:
        return f"{self.kind} at {self.place} {self.count}, rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Chain:
    """Faults that one run meets, one after the other.

    Args:
        number: which chain of the campaign this is.
        layout, form: names, see :mod:`runner.recipes.faults.layouts`.
        restarts: whether the command itself starts failed ranks again; else the next command does.
        faults: in the order in which they come.
        first: how many faults of the campaign's chain came before these, in earlier runs.
    """

    number: int
    layout: str
    form: str
    restarts: bool
    faults: tuple[Fault, ...]
    first: int = 0

    @property
    def name(self) -> str:
        return f"{self.number}-{self.first}" if self.first else str(self.number)

    def split(self, happened: int) -> tuple[Chain, Chain | None]:
        """What a run has met of the chain, with the fault that it did not reach; the rest is for another run."""
        met, rest = self.faults[: happened + 1], self.faults[happened + 1 :]
        return replace(self, faults=met), replace(self, faults=rest, first=self.first + len(met)) if rest else None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Chain:
        values = json.loads(text)
        return cls(**values | {"faults": tuple(Fault(**each) for each in values["faults"])})


def counted(number: int, noun: str) -> str:
    """``1 fault`` or ``2 faults``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(lines: Sequence[str]) -> str:
    """Lines for people, each with a dash."""
    return "".join(f"- {line}\n" for line in lines)
