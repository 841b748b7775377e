"""The strategy that finds the fastest persistent schedule of a stage under a budget, by dynamic programming.

Source: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova 2019, Optimal Checkpointing for Heterogeneous
Chains: How to Train Deep Neural Networks with Limited Memory; later published as rotor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from runner.memory.solve.build import Cut, Keep, program_of
from runner.memory.solve.long_chains import in_groups
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import ChainProgram, Segment, StageChain
from runner.options import Option

if TYPE_CHECKING:
    from runner.memory.solve.solvers.in_flight import FirstForward, Partly
    from runner.memory.solve.solvers.persistent import ChainCosts, PersistentPlan

__all__ = ["RESOLUTION", "STRATEGY", "chain_costs", "fastest_part", "persistent_plan", "programs_in_flight", "thinned"]

_SLOTS = 500
_OFFERS = 64  # programs that are offered, evenly over the budgets at which the program changes
_SHARES = 8  # with several micro-batches in flight: sizes of the memory in which a part is run again
_LONGEST = 200  # layers, each decided by itself: the solver takes half a second then, and eight times for twice as many


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    yield from in_groups(_of_chain, chain, _LONGEST)


def _of_chain(chain: StageChain) -> Iterator[Candidate]:
    """The program that keeps everything, and the fastest ones of less and less memory."""
    yield Candidate("rotor", (Segment(chain.first, chain.last),))
    plan = persistent_plan(chain)
    made = _alone(chain, plan) if chain.in_flight == 1 else programs_in_flight(chain, plan)
    yield from (Candidate("rotor", program) for program in dict.fromkeys(made))


def persistent_plan(chain: StageChain) -> PersistentPlan:
    """The table of the stage's dynamic program, for all the memory in which every layer can keep its graph."""
    from runner.memory.solve.solvers.persistent import PersistentPlan

    costs, slots = chain_costs(chain), _slots(chain)
    rounded = (len(costs.saved) + 3) / slots  # each size is rounded up to a unit
    return PersistentPlan(costs, costs.peak * (1 + rounded), slots)


def _slots(chain: StageChain) -> int:
    return int(chain.options.get("resolution", _SLOTS))


def _alone(chain: StageChain, plan: PersistentPlan) -> Iterator[ChainProgram]:
    for memory in thinned(plan.levels):
        yield fastest_part(chain, plan, chain.first, chain.last, memory)


def fastest_part(chain: StageChain, plan: PersistentPlan, first: int, last: int, memory: int) -> ChainProgram:
    """The fastest program of a part of a stage.

    Args:
        chain: the stage.
        plan: its dynamic program.
        first, last: the part's layers, indices in the whole model, inclusive.
        memory: units of the dynamic program, in which there must be a way.
    """

    def decide(first: int, last: int, memory: int) -> Cut[int] | Keep[int]:
        step = plan.step(first - chain.first, last - chain.first, memory)
        if step.until is None:
            return Keep(first, step.rest)
        return Cut(chain.first + step.until - 1, inside=memory, rest=step.rest)

    return program_of(first, last, memory, decide)


class _Units(NamedTuple):
    """Units of memory of layers that are run again, or if ``first_forward``, for what the first forward leaves."""

    memory: int
    first_forward: bool


def programs_in_flight(
    chain: StageChain, plan: PersistentPlan, partly: Sequence[Sequence[Partly]] = ()
) -> Iterator[ChainProgram]:
    """The fastest programs by what each first forward leaves and by what takes memory once.

    Args:
        chain: the stage.
        plan: its table.
        partly: for each layer, presets of operators whose outputs it may keep alone.
    """
    from runner.memory.solve.solvers.in_flight import FirstForward

    slots = _slots(chain)
    tables = {
        again: FirstForward(plan, len(chain.layers), again, min(slots, plan.keeping_all), partly)
        for again in (slots * share // _SHARES for share in range(1, _SHARES + 1))
    }
    ways = sorted(
        (seconds, chain.in_flight * stash + again, stash, again)
        for again, table in tables.items()
        for stash, seconds in table.levels
    )
    least, front = float("inf"), []
    for _, memory, stash, again in ways:
        if memory < least:
            least = memory
            front.append((stash, again))
    for stash, again in thinned(front):
        yield _of_flight(chain, plan, tables[again], stash, again)


def _of_flight(chain: StageChain, plan: PersistentPlan, table: FirstForward, stash: int, again: int) -> ChainProgram:
    def decide(first: int, last: int, units: _Units) -> Cut[_Units] | Keep[_Units]:
        if units.first_forward:
            step = table.step(first - chain.first, units.memory)
        else:
            step = plan.step(first - chain.first, last - chain.first, units.memory)
        rest = units._replace(memory=step.rest)
        if step.partly is not None:
            return Cut(first, units, rest, save_ops=step.partly)
        if step.until is None:
            return Keep(first, rest)
        inside = _Units(again, first_forward=False) if units.first_forward else units
        return Cut(chain.first + step.until - 1, inside, rest)

    return program_of(chain.first, chain.last, _Units(stash, first_forward=True), decide)


def thinned(levels: list) -> list:  # type: ignore[type-arg]
    """At most so many of the levels as programs are offered, with the first and the last."""
    if len(levels) <= _OFFERS:
        return levels
    return [levels[round(number * (len(levels) - 1) / (_OFFERS - 1))] for number in range(_OFFERS)]


def chain_costs(chain: StageChain) -> ChainCosts:
    """The stage's costs as the dynamic program takes them; the loss is what the last layer's forward has besides."""
    import numpy as np

    from runner.memory.solve.solvers.persistent import ChainCosts

    layers, loss = chain.layers, chain.loss
    forward_extra = [
        max(layer.forward_transient_bytes, (layer.unsaved_forward_bytes or 0) - layer.output_bytes) for layer in layers
    ]
    backward = [layer.backward_seconds for layer in layers]
    if loss is not None:
        running = max(loss.forward_transient_bytes, loss.backward_transient_bytes)
        forward_extra[-1] = max(forward_extra[-1], loss.saved_bytes + running)
        backward[-1] += loss.forward_seconds + loss.backward_seconds
    given = chain.profile.layers[chain.first - 1].output_bytes if chain.first else chain.profile.input_bytes
    return ChainCosts(
        forward=np.array([layer.forward_seconds for layer in layers]),
        backward=np.array(backward),
        sizes=np.array([given, *(layer.output_bytes for layer in layers)], dtype=float),
        saved=np.array([layer.saved_bytes for layer in layers], dtype=float),
        forward_extra=np.array(forward_extra, dtype=float),
        backward_extra=np.array([layer.inner_backward_bytes for layer in layers], dtype=float),
    )


RESOLUTION = Option(
    "resolution",
    int,
    "units into which the dynamic program divides the memory; null = 500",
    example="500",
    rule="must be from 10 to 5000",
    breaks=lambda units: not 10 <= units <= 5000,
    fix="500",
    required=False,
)
"""The key that ``rotor`` and ``rockmate`` have in common."""

STRATEGY = Strategy(
    "rotor",
    FULL.solve,
    source="Beaumont et al. 2019, Optimal Checkpointing for Heterogeneous Chains (rotor)",
    about="the fastest program under memory_limit that keeps inputs until they have been used, by dynamic programming",
    options=(RESOLUTION,),
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
)
