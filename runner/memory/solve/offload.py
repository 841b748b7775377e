"""Defines an offload strategy: which of a stage's saved tensors are in the host's memory until their backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from runner.errors import Problem, RequestError
from runner.memory.solve.residency import WeightUnit
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import ChainProgram, Program, Segment, StageChain
from runner.memory.solve.weight_sets import first_of_orders
from runner.memory.solve.weight_strategy import Choose, StageUnits

__all__ = ["Offload", "chain_program", "first_layers", "first_weights", "move_all", "moving", "prefixes"]

Mover = Callable[[StageChain, ChainProgram], ChainProgram]
"""A function from a stage's chain and the program of its activation policy to the same program with moves."""

Offers = Callable[[StageChain, ChainProgram], Iterable[Candidate]]
"""A function from a stage's chain and the program of its activation policy to programs with moves."""


@dataclass(frozen=True, slots=True)
class Offload:
    """One way to choose what is moved.

    Args:
        name: how ``offload.activations`` names it.
        move: marks the segments that are moved. It is pure: the same chain and program give the same result.
        source: the publication or software from which it comes.
        about: what it does, in one line.
        candidates: makes the programs among which a stage gets the fastest that fits into its budget, as from
            :attr:`runner.memory.solve.strategy.Strategy.candidates`; ``move`` serves as long as the budget is not
            known. None: it reads no budget, and moves the same of every program.
        alone: whether its candidates say of all layers what is kept, moved or computed again, and no activation policy
            does.
        searches: whether to find its candidates takes seconds, so that ``auto`` leaves it out.
        by_lifetime: whether the stages of a rank share its memory by how long their tensors live: those that live
            shortest are kept first. Otherwise each gets an equal part.
        plans_arena: whether the plan tells how large an arena is in which everything of a stage has its place; see
            :mod:`runner.memory.solve.static_arena`.
        recuts: whether ``partition=auto`` moves layers from stage to stage where what it chooses then is faster.
        peers: whether a rank may keep everything and lend micro-batches to another one, where that is faster than its
            own program.
        lends: whether ranks above their limit lend micro-batches to others; its programs move nothing to a host then.
        choose_weights: chooses among a stage's weights, with ``offload.scope=weights`` instead and with ``all`` where
            activations are not enough; None: its way to choose is of what layers save.
    """

    name: str
    move: Mover
    source: str = ""
    about: str = ""
    candidates: Offers | None = None
    alone: bool = False
    searches: bool = False
    by_lifetime: bool = False
    plans_arena: bool = False
    recuts: bool = False
    lends: bool = False
    peers: bool = False
    choose_weights: Choose | None = None

    def over(self, policy: Strategy) -> Strategy:
        """The activation policy with moves.

        Args:
            policy: the policy; it must not read a budget if this strategy reads one.
        """

        def solve(chain: StageChain) -> ChainProgram:
            return self.move(chain, policy(chain))

        if self.candidates is None:
            return replace(policy, solve=solve, candidates=_all_moved(self.move, policy))
        own = self.candidates
        return replace(
            policy,
            name=self.name,
            solve=solve,
            reads_budget=True,
            chooses=True,
            candidates=lambda chain: own(chain, policy(chain)),
        )


def _all_moved(move: Mover, policy: Strategy) -> Callable[[StageChain], Iterable[Candidate]] | None:
    """The candidates of a policy, each with its moves; None if it has none."""
    offered = policy.candidates
    if offered is None:
        return None
    return lambda chain: (Candidate(name, move(chain, chain_program(program))) for name, program in offered(chain))


def chain_program(program: Program) -> ChainProgram:
    """The program, of which segments can be moved.

    Raises:
        RequestError: it is a program of another kind; rules refuse the strategies of this package that make some.
    """
    if not isinstance(program, tuple):
        rule, why = "must be none where another program than one of segments runs", "Both replace what autograd saves"
        raise RequestError([Problem("offload.activations", "async", rule, why, "offload=none")])
    return program


def moving(program: ChainProgram, chosen: Collection[int], *, one_by_one: bool = False) -> ChainProgram:
    """The program with moves. Layers that keep what they save are moved one by one, each as soon as it has run.

    Args:
        program: the program of a stage.
        chosen: the layers that are moved, as indices in the whole model. A segment that is computed again is moved if
            its first layer is chosen: its input is all that it keeps.
        one_by_one: see :class:`runner.memory.solve.values.Segment`.
    """

    def as_chosen(part: Segment) -> Segment:
        moved = part.first in chosen
        return replace(part, moved=moved, one_by_one=moved and one_by_one)

    made: list[Segment] = []
    for segment in program:
        layers = range(segment.first, segment.last + 1)
        parts = [segment] if segment.recompute else [replace(segment, first=at, last=at) for at in layers]
        made += map(as_chosen, parts)
    return tuple(made)


def move_all(chain: StageChain, program: ChainProgram) -> ChainProgram:
    """The program in which every layer of a stage moves; most strategies start with it."""
    return moving(program, chain.indices)


def first_layers(name: str) -> Offers:
    """The candidates of a strategy that moves the first layers of a stage, none to all."""
    return lambda chain, program: prefixes(name, program, chain.indices)


def first_weights(stage: StageUnits) -> list[WeightUnit]:
    """The weights of the first layers, which are not used for the longest time, as few as the limit asks for."""
    return first_of_orders(stage.units, stage.excess_bytes or 0, [range(len(stage.units))])


def prefixes(name: str, program: ChainProgram, order: Iterable[int]) -> Iterator[Candidate]:
    """Programs that move nothing, the first layer of an order, the first two, and so on.

    Args:
        name: the strategy's name.
        program: the program of the activation policy.
        order: layers, as indices in the whole model; the most worthwhile is first.
    """
    chosen: set[int] = set()
    yield Candidate(f"{name} of nothing", moving(program, chosen))
    for layer in order:
        chosen.add(layer)
        yield Candidate(f"{name} of {len(chosen)}", moving(program, chosen))
