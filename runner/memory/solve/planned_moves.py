"""Makes programs with moves from the dynamic program of :mod:`runner.memory.solve.solvers.moving`.

It reserves the same memory for what is on its way at every moment. The plan adds it up moment by moment, and sees that
some moves take less, such as those of the last layers: so :func:`with_neighbours` offers a little more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from runner.memory.solve.offload import chain_program
from runner.memory.solve.strategies.rotor import chain_costs, fastest_part, thinned
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, Program, Segment, StageChain

if TYPE_CHECKING:
    from runner.memory.solve.solvers.moving import Decision
    from runner.memory.solve.solvers.persistent import ChainCosts, PersistentPlan

__all__ = ["planned_moves", "with_neighbours"]

_SLOTS, _FEWEST_SLOTS, _SLOTS_OF_LAYERS = 160, 40, 2000  # units of memory; fewer of them for long chains
_STEPS = 8  # units of a full lane
_NEIGHBOURS = 150  # programs at most that differ in one layer; evenly many of each part if there are more
_ROOMS = 4  # numbers of bytes that may be on their way which are tried


def planned_moves(chain: StageChain, name: str, *, recomputes: bool) -> Iterator[Candidate]:
    """The fastest programs of less and less memory, in a model of the stage.

    Args:
        chain: the stage.
        name: the strategy's name.
        recomputes: whether layers may be run again.
    """
    from runner.memory.solve.solvers.moving import Link, MovePlan
    from runner.memory.solve.solvers.persistent import PersistentPlan

    costs, count = chain_costs(chain), len(chain.layers)
    slots = max(_FEWEST_SLOTS, min(_SLOTS, _SLOTS_OF_LAYERS // count))
    memory = (costs.peak + (chain.in_flight - 1) * float(costs.saved.sum())) * (1 + (count + 3) / slots)
    saves_input = [layer.saves_input for layer in chain.layers]
    again = PersistentPlan(costs, memory, slots) if recomputes else None
    made: dict[ChainProgram, None] = {}
    for room in _rooms(costs, recomputes=recomputes):
        link = Link(chain.copy_seconds, room, _STEPS)
        plan = MovePlan(costs, link, memory, slots, saves_input=saves_input, in_flight=chain.in_flight, again=again)
        made |= {_program(chain, again, list(plan.decisions(level))): None for level in thinned(plan.levels)}
    yield from (Candidate(name, program) for program in made)


def with_neighbours(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """The candidates, and programs in which one layer's move differs from that of a candidate."""
    found = {each.program: each for each in candidates}
    yield from found.values()
    changed = {near: each.name for each in found.values() for near in _neighbours(each.program) if near not in found}
    programs = list(changed)
    for program in programs[:: -(-len(programs) // _NEIGHBOURS) or 1]:
        yield Candidate(changed[program], program)


def _neighbours(program: Program) -> Iterator[ChainProgram]:
    """The programs in which one layer that keeps its graph is moved instead of kept, or kept instead of moved."""
    segments = chain_program(program)
    for at, segment in enumerate(segments):
        if not segment.recompute:
            yield (*segments[:at], replace(segment, moved=not segment.moved), *segments[at + 1 :])


def _rooms(costs: ChainCosts, *, recomputes: bool) -> list[float]:
    """Bytes that may be on their way: of the things that can be moved, the largest and some smaller ones."""
    inputs = [float(size) for size in costs.sizes[1:-1]] if recomputes else []
    sizes = sorted({size for size in (*map(float, costs.saved), *inputs) if size > 0})
    if len(sizes) <= _ROOMS:
        return sizes
    return [sizes[round(number * (len(sizes) - 1) / (_ROOMS - 1))] for number in range(_ROOMS)]


def _program(chain: StageChain, again: PersistentPlan | None, decisions: Sequence[Decision]) -> ChainProgram:
    return tuple(_segment(chain, again, decision) for decision in decisions)


def _segment(chain: StageChain, again: PersistentPlan | None, decision: Decision) -> Segment:
    first, last = chain.first + decision.first, chain.first + decision.last
    if decision.again is None:
        return Segment(first, last, moved=decision.moved)
    assert again is not None  # otherwise nothing is run again
    inside = fastest_part(chain, again, first, last, decision.again) if last > first else ()
    return Segment(first, last, recompute=True, inside=inside, moved=decision.moved)
