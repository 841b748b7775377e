"""The input of a strategy, a stage's chain, and its result, a program.

A program says what happens to every layer between its forward and its backward. A chain program is a sequence of
:class:`Segment`, and a segment that is run forward again says how by its own program. So a program may run layers any
number of times; :mod:`.program` lists it step by step. Other kinds of programs are each a :class:`StageProgram`, which
says itself what it costs and what installs it. A :class:`GraphProgram` runs single layers again in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from runner.memory.solve.shared_weights import SharedGradients
from runner.profile import LayerProfile, ModelProfile, Rehearsal

__all__ = [
    "ActivationPlan",
    "ChainProgram",
    "GraphProgram",
    "LayerBackward",
    "Offer",
    "PlainStage",
    "PolicyOptions",
    "Price",
    "Program",
    "Rerun",
    "Segment",
    "StageChain",
    "StageChoice",
    "StageProgram",
]


@dataclass(frozen=True, slots=True, init=False)
class PolicyOptions:
    """A strategy with the options that were given.

    Args:
        name: the strategy's name.
        target: ``package.module:name`` of a user's own strategy; None for one of this package.
        values: the given options by key.
    """

    name: str
    target: str | None
    values: Mapping[str, Any]

    def __init__(self, name: str = "none", target: str | None = None, /, **values: Any) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "values", {key: value for key, value in values.items() if value is not None})


def _free(num_bytes: float) -> float:
    """The seconds of a move where the speed of the host's link is not known."""
    return 0.0


@dataclass(frozen=True, slots=True)
class StageChain:
    """One stage as a strategy sees it: a chain of layers with the cost of each.

    Args:
        profile: the profile of the whole model.
        first, last: the stage's layers, indices in the whole model, inclusive.
        options: the options that were given to the strategy, by key.
        budget_bytes: the bytes that saved tensors and temporaries of the stage may take on its rank, for all
            micro-batches in flight together; None if it is not known, as in the first search for a partition.
        in_flight: the largest number of micro-batches of which anything is alive at once between forward and backward,
            where a backward in two parts ends with W.
        copy_seconds: the seconds that a number of bytes takes to the host's memory, or back.
        price: what a program of the stage costs, by the plan's prediction; None as long as nothing is chosen.
        may_run_graphs: whether graph programs can be run beside everything else that was asked for.
        between: the largest number of those whose forward has begun and whose I has not ended; None = ``in_flight``.
    """

    profile: ModelProfile
    first: int
    last: int
    options: Mapping[str, Any] = field(default_factory=dict)
    budget_bytes: int | None = None
    in_flight: int = 1
    copy_seconds: Callable[[float], float] = _free
    price: Callable[[Program], Price] | None = None
    may_run_graphs: bool = False
    between: int | None = None

    @property
    def saved_at_once(self) -> int:
        """The largest number of micro-batches of which more is alive at once than what W needs."""
        return self.in_flight if self.between is None else self.between

    @property
    def indices(self) -> range:
        """The indices of its layers in the whole model."""
        return range(self.first, self.last + 1)

    @property
    def layers(self) -> tuple[LayerProfile, ...]:
        """The profiles of its layers, in order."""
        return self.profile.layers[self.first : self.last + 1]

    @property
    def loss(self) -> LayerProfile | None:
        """The profile of the loss if this is the last stage: it runs after the last layer and keeps its graph."""
        return self.profile.loss if self.last == len(self.profile.layers) - 1 else None


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers that are kept or computed again together.

    Args:
        first, last: indices in the whole model, inclusive.
        recompute: whether only their common input is kept and they are run forward again before their backward.
        save_ops: preset of operators whose outputs are kept while the rest is computed again; None = no operators.
        inside: how they are run forward again: a program of the same layers, whose segments may themselves be
            computed again. Empty = every layer keeps its graph until its backward.
        moved: whether what they keep is in the host's memory between their forward and their backward.
        one_by_one: see :class:`runner.profile.LayerMoves`; only with ``moved``.
    """

    first: int
    last: int
    recompute: bool = False
    save_ops: str | None = None
    inside: tuple[Segment, ...] = ()
    moved: bool = False
    one_by_one: bool = False


ChainProgram = tuple[Segment, ...]
"""Segments in order; together they are the layers of a stage, or of the segment that contains them."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """A layer of a graph program runs forward again.

    Args:
        layer: index in the whole model.
        keeps_graph: whether what its autograd saves is kept until its backward.
        keeps: storages of its output that are kept, by their numbers in the profile.
        drops: storages that are not needed after it.
        given: whether it is given the outputs of operators that the first run has left, which are dropped after it.
    """

    layer: int
    keeps_graph: bool
    keeps: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    given: bool = False


@dataclass(frozen=True, slots=True)
class LayerBackward:
    """What a graph program does at the backward of a layer.

    Args:
        before: layers that run forward again right before it, in order.
        drops: storages that are not needed after it.
    """

    before: tuple[Rerun, ...] = ()
    drops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlainStage:
    """The rows from which a program makes its own.

    Args:
        before: the layer before the stage, None for the first stage.
        layers: the stage's layers.
        loss: the loss if the stage is the last.
        shared: the gradients of weights that several of the layers share.
        adjusted: makes the rows of the layers, and that of the loss if there is one, if everything is kept.
        rehearsals: what is known of programs that decide in the run.
    """

    before: LayerProfile | None
    layers: list[LayerProfile]
    loss: LayerProfile | None
    shared: SharedGradients
    adjusted: Callable[[], list[LayerProfile]]
    rehearsals: Sequence[Rehearsal] = ()


class StageProgram(ABC):
    """A program of a stage that is no chain of segments; all that other code asks of it is here.

    Attributes:
        first, last: the stage's layers, indices in the whole model, inclusive.
        installer: ``package.module:function`` that wraps a stage module as the program says, from the two.
    """

    __slots__ = ()

    first: int
    last: int
    installer: ClassVar[str]

    @property
    def wants_rehearsal(self) -> bool:
        """Whether the run decides what is kept, so that only a run on tensors without memory tells what it takes."""
        return False

    @property
    @abstractmethod
    def forwards(self) -> int:
        """The total number of forwards of layers, including the first ones; an estimate if the run decides."""

    @abstractmethod
    def rows(self, stage: PlainStage) -> list[LayerProfile]:
        """The rows of the stage's layers under the program, and that of the loss if there is one."""


@dataclass(frozen=True, slots=True)
class GraphProgram(StageProgram):
    """Says for a stage as a graph what is kept and what is run again.

    The nodes of the graph are layers. Its values are the tensors between layers, by storage, and for each layer what
    else its autograd saves, as one value. The first forward runs each layer once, and backwards run from the last layer
    to the first. Before a backward, any layers whose input is there may run again.

    Args:
        first, last: the stage's layers, indices in the whole model, inclusive.
        keeps_graph: for each layer whether what its autograd saves is kept from the first forward to the backward.
        keeps: storages of tensors between layers that are kept from the first forward, by their numbers in the profile.
        outputs: for each layer the storages of its output, in order, without those of tensors that an earlier stage has
            made; the executor finds its tensors by them.
        backwards: for each layer what is done at its backward.
        save_ops: for each layer the preset of operators whose outputs its first run leaves to a later one, or None;
            empty = None for all.
    """

    first: int
    last: int
    keeps_graph: tuple[bool, ...]
    keeps: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    backwards: tuple[LayerBackward, ...]
    save_ops: tuple[str | None, ...] = ()

    installer: ClassVar[str] = "runner.memory.apply.graph_run:install_graph"

    @property
    def forwards(self) -> int:
        """See :class:`StageProgram`."""
        return len(self.keeps_graph) + len(self.reruns)

    def rows(self, stage: PlainStage) -> list[LayerProfile]:
        """See :class:`StageProgram`."""
        from runner.memory.solve.graph.rows import graph_rows  # it plays this program

        return graph_rows(stage.before, stage.layers, stage.loss, self, stage.shared)

    def leaves(self, layer: int) -> str | None:
        """The preset of operators whose outputs the first run of a layer leaves; the layer is one of the stage's."""
        return self.save_ops[layer - self.first] if self.save_ops else None

    @property
    def reruns(self) -> list[int]:
        """The layers that are run forward again, as often as they are."""
        return [rerun.layer for backward in self.backwards for rerun in backward.before]


Program = ChainProgram | StageProgram
"""What happens to the layers of a stage between forward and backward."""


class Price(NamedTuple):
    """What a stage's program costs; see :class:`Offer`."""

    peak_bytes: int
    seconds: float
    moved_bytes: int = 0


class Offer(NamedTuple):
    """A program that could have been chosen for a stage, with its predicted cost.

    Args:
        name: the strategy that made it, with its options.
        peak_bytes: the most that saved tensors and temporaries of the stage take, of all micro-batches in flight.
        seconds: the forward and the backward of one micro-batch, with what they wait for the host's memory.
        moved_bytes: what one micro-batch moves to the host's memory, and back.
    """

    name: str
    peak_bytes: int
    seconds: float
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The choice of a stage's program under a budget.

    Args:
        chosen: the program that was chosen.
        budget_bytes: the budget.
        offers: all programs that there were, from the fastest to the slowest.
        programs: the programs of the offers.
    """

    chosen: Offer
    budget_bytes: int
    offers: tuple[Offer, ...]
    programs: tuple[Program, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """Says what happens to every saved tensor.

    Args:
        stages: the program of each stage.
        to_host: whether hooks send every saved tensor of the stages' layers to the host between forward and backward.
        host_apart: whether the host's memory is not the device's; otherwise what is sent there stays where it is.
        choices: how each stage's program was chosen, if a strategy chooses under a budget; otherwise empty.
    """

    stages: tuple[Program, ...]
    to_host: bool = False
    choices: tuple[StageChoice, ...] = ()
    host_apart: bool = True

    def with_choice(self, stage: int, program: Program, offer: Offer) -> ActivationPlan:
        """The plan with another of a stage's offers, whose program is given."""
        stages, choices = list(self.stages), list(self.choices)
        stages[stage], choices[stage] = program, replace(choices[stage], chosen=offer)
        return replace(self, stages=tuple(stages), choices=tuple(choices))
