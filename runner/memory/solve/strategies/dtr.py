"""The strategy that evicts the tensor with the least score whenever memory is full, and computes it again when needed.

The same greedy decisions are made at one of two moments. Beforehand, for the layers of a stage and in falling parts of
its plain peak: peaks and seconds are predicted, and nothing watches operators in a run. Or ``online``, for operators
while they run, as the authors do it, within layers, too. The plan then chooses by bounds, which follow from the size of
the pool, and rehearses what it has chosen.

Source: Kirisame et al. 2021, Dynamic Tensor Rematerialization.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from runner.errors import did_you_mean
from runner.memory.solve.arena import Arena, ArenaProgram
from runner.memory.solve.evicting import EvictingProgram
from runner.memory.solve.graph.evicting import SCORES, Forward, evicting_order
from runner.memory.solve.graph.stage import StageGraph, graph_of, program_of_order
from runner.memory.solve.graph.values import Order, replayed
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import Program, Segment, StageChain
from runner.options import Option

__all__ = ["STRATEGY", "pools"]

_BUDGETS = 40  # programs are made for these equal parts of the plain peak
_BUDGETS_IN_FLIGHT = 12  # with several micro-batches in flight: for the first forward, and for what follows
_PATIENCE = 8  # computations for each value, beyond which a program is too slow to be of use


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    """The program that keeps everything, and those of less and less memory."""
    score, online = str(chain.options.get("score", "full")), bool(chain.options.get("online", False))
    name = f"dtr {score}{' online' if online else ''}"
    yield Candidate(name, (Segment(chain.first, chain.last),))
    make = (
        pools(chain, score, EvictingProgram) if online else _programs(graph_of(chain), score, in_flight=chain.in_flight)
    )
    yield from (Candidate(name, program) for program in dict.fromkeys(make))


def pools(chain: StageChain, score: str, kind: type[EvictingProgram]) -> Iterator[EvictingProgram]:
    """Pools of falling size, with the forwards that the layers' own graph would run again in such a part of memory.

    Args:
        chain: the stage.
        score: a key of :data:`runner.memory.solve.graph.evicting.SCORES`.
        kind: the kind of program; for an arena, the layers' values lie in one, too, where there is room for them.
    """
    stage = graph_of(chain)
    most = replayed(stage.graph, stage.graph.once).peak_bytes
    saved = chain.saved_at_once * max(
        0, sum(layer.saved_bytes for layer in chain.layers) - chain.layers[-1].output_bytes
    )
    for part in range(_BUDGETS - 1, 0, -1):
        budget = most * part // _BUDGETS
        order = _order(stage, budget, budget, score, Arena(budget)) if kind is ArenaProgram else None
        order = order or _order(
            stage, budget, budget, score
        )  # temporaries of layers take a gap there, but not in a run
        if order is None:
            return
        again = Counter(program_of_order(stage, order).reruns)
        counts = tuple(again[layer] for layer in chain.indices)
        yield kind(chain.first, chain.last, score, saved * part // _BUDGETS, chain.saved_at_once, counts)


def _programs(stage: StageGraph, score: str, *, in_flight: int) -> Iterator[Program]:
    most = replayed(stage.graph, stage.graph.once).peak_bytes
    for budget, of_forward in _budgets(most, in_flight):
        order = _order(stage, budget, of_forward, score)
        if order is not None:
            yield program_of_order(stage, order)


def _order(
    stage: StageGraph, budget: int, of_forward: int, score: str, arena: Arena[int] | None = None
) -> Order | None:
    of_loss = frozenset(index for index, layer in enumerate(stage.layers) if layer == stage.num_layers)
    forward = Forward(stage.num_forward, of_forward, of_loss)
    return evicting_order(stage.graph, budget, score=score, forward=forward, patience=_PATIENCE, arena=arena)


def _budgets(most: int, in_flight: int) -> Iterator[tuple[int, int]]:
    """Budgets of a whole step and of its forward; what a forward leaves weighs more with others in flight."""
    if in_flight == 1:
        yield from ((most * part // _BUDGETS, most * part // _BUDGETS) for part in range(_BUDGETS - 1, 0, -1))
        return
    parts = range(_BUDGETS_IN_FLIGHT, 0, -1)
    unit = most // _BUDGETS_IN_FLIGHT
    yield from ((unit * whole, unit * first) for whole in parts for first in range(whole, 0, -1))


STRATEGY = Strategy(
    "dtr",
    FULL.solve,
    source="Kirisame et al. 2021, Dynamic Tensor Rematerialization",
    about="under memory_limit, the tensor or graph of a layer with the least score is dropped when memory is full",
    options=(
        Option(
            "score",
            str,
            f"what is dropped first: {', '.join(SCORES)}; null = full",
            example="full",
            rule=f"must be one of {', '.join(SCORES)}",
            breaks=lambda score: score not in SCORES,
            fix=lambda score: did_you_mean(score, SCORES) or "full",
            required=False,
        ),
        Option(
            "online",
            bool,
            "decide while operators run, and for each of them, instead of before the run for layers; null = false",
            example="true",
            required=False,
        ),
    ),
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
    runs_graphs=True,
)
