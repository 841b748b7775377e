"""What a strategy is asked and what it answers.

The answer is a program: what becomes of every layer between its forward and its backward. A program is a sequence of
:class:`Segment`, and a segment that is run forward again says how, by a program of its own. So a program re-enters
layers as often as it likes; :mod:`.program` lists it step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.profile import LayerProfile, ModelProfile

__all__ = ["ActivationPlan", "PolicyOptions", "ChainProgram", "Segment", "StageChain"]


@dataclass(frozen=True, slots=True, init=False)
class PolicyOptions:
    """A strategy with the options that were given.

    Args:
        name: of the strategy.
        target: ``package.module:name`` of a user's own one; None for one that is shipped.
        values: options by key, those that were not given left out.
    """

    name: str
    target: str | None
    values: Mapping[str, Any]

    def __init__(self, name: str = "none", target: str | None = None, /, **values: Any) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "values", {key: value for key, value in values.items() if value is not None})


@dataclass(frozen=True, slots=True)
class StageChain:
    """One stage as a strategy sees it: a chain of layers with what each costs.

    Args:
        profile: of the whole model.
        first, last: the stage's layers, indices in the whole model, inclusive.
        options: what was given to the strategy, by key.
        budget_bytes: what the stage's saved tensors and temporaries may take on its rank, of all micro-batches in
            flight together; None where that is not known, as in the first search for a partition.
        in_flight: micro-batches whose saved tensors are alive at once, at most.
    """

    profile: ModelProfile
    first: int
    last: int
    options: Mapping[str, Any] = field(default_factory=dict)
    budget_bytes: int | None = None
    in_flight: int = 1

    @property
    def indices(self) -> range:
        """Of its layers in the whole model."""
        return range(self.first, self.last + 1)

    @property
    def layers(self) -> tuple[LayerProfile, ...]:
        """Profiles of its layers, in order."""
        return self.profile.layers[self.first : self.last + 1]

    @property
    def loss(self) -> LayerProfile | None:
        """The profile of the loss where this is the last stage: it runs behind the last layer and keeps its graph."""
        return self.profile.loss if self.last == len(self.profile.layers) - 1 else None


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers that are treated as one.

    Args:
        first, last: indices in the whole model, inclusive.
        recompute: keep their common input only, and run them forward again before their backward.
        save_ops: operators whose outputs are kept although the others are computed again; None = of none.
        inside: how they are run forward again: a program of the same layers, whose segments may be computed again in
            their turn. Empty = every layer keeps its graph until its backward.
    """

    first: int
    last: int
    recompute: bool = False
    save_ops: str | None = None
    inside: tuple[Segment, ...] = ()


ChainProgram = tuple[Segment, ...]
"""Segments in order: together they are the layers of a stage, or of the segment that they are inside of."""


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """What becomes of every saved tensor.

    Args:
        stages: per stage, its program.
        to_host: saved tensors of the stages' layers leave the device between forward and backward.
    """

    stages: tuple[ChainProgram, ...]
    to_host: bool = False
