"""The strategy that keeps the tensors at the borders of parts of a stage, and runs the parts again.

Source: Kusumoto, Inoue, Watanabe, Akiba, Koyama 2019, A Graph Theoretic Framework of Recomputation Algorithms for
Memory-Efficient Backpropagation.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.errors import Problem, RequestError
from runner.memory.solve.graph.lower_sets import (
    Sequences,
    backwards_in_turn,
    lower_sets,
    prefix_closures,
)
from runner.memory.solve.graph.stage import StageGraph, graph_of, program_of_order
from runner.memory.solve.graph.values import Order, Value
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategy import SECTION, Candidate, Strategy
from runner.memory.solve.values import Segment, StageChain
from runner.options import Option

__all__ = ["STRATEGY", "orders_of_sequences"]

_BUDGETS = 40  # programs are solved for these equal parts of the memory of one part with all layers


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    """The program that keeps everything, and those of the sequences of lower sets for less and less memory."""
    approximate = bool(chain.options.get("approximate", False))
    name = "kusumoto approximate" if approximate else "kusumoto"
    yield Candidate(name, (Segment(chain.first, chain.last),))
    stage = graph_of(chain)
    programs = (program_of_order(stage, order) for order in orders_of_sequences(stage, approximate=approximate))
    yield from (Candidate(name, program) for program in dict.fromkeys(programs))


def orders_of_sequences(stage: StageGraph, *, approximate: bool) -> Iterator[Order]:
    """The orders of the sequences of lower sets that compute least again in less and less memory.

    Args:
        stage: the stage.
        approximate: whether only the lower sets of single layers, and of all from which they follow, are used.

    Raises:
        RequestError: there are too many lower sets.
    """
    graph, count, sets = stage.graph, stage.num_forward, _sets(stage, approximate=approximate)
    most = 2 * sum(value.num_bytes + value.transient_bytes for value in graph.values)
    found, sequences = None, Sequences(graph, count, sets)
    for part in range(_BUDGETS, 0, -1):
        sequence = sequences.least(most * part // _BUDGETS)
        if sequence is None:
            return
        if sequence != found:
            yield backwards_in_turn(graph, count, sequence)
        found = sequence


def _sets(stage: StageGraph, *, approximate: bool) -> list[int]:
    """The lower sets of whole layers, as sets of values."""
    layers = max(stage.layers) + 1
    values = [0] * layers
    needs: list[set[int]] = [set() for _ in range(layers)]
    for index in range(stage.num_forward):
        layer = stage.layers[index]
        values[layer] |= 1 << index
        needs[layer] |= {stage.layers[need] for need in stage.graph.values[index].needs} - {layer}
    nodes = [Value(0.0, 0, tuple(sorted(before))) for before in needs]
    try:
        found = prefix_closures(nodes) if approximate else lower_sets(nodes)
    except ValueError as error:
        rule, fix = "must be true for this model", f"{SECTION}.approximate=true"
        raise RequestError([Problem(f"{SECTION}.approximate", False, rule, str(error), fix)]) from error
    return [sum(values[layer] for layer in range(layers) if members >> layer & 1) for members in found]


STRATEGY = Strategy(
    "kusumoto",
    FULL.solve,
    source="Kusumoto et al. 2019, A Graph Theoretic Framework of Recomputation Algorithms",
    about="under memory_limit, tensors at the borders of parts are kept, and the parts run again",
    options=(
        Option(
            "approximate",
            bool,
            "use only the lower sets of single layers and of all from which they follow; null = false",
            example="true",
            required=False,
        ),
    ),
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
    runs_graphs=True,
)
