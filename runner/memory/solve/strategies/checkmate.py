"""The strategy that finds a stage's cheapest graph program under a budget by a mixed integer program.

Source: Jain et al. 2020, Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from runner.errors import Problem, RequestError
from runner.memory.solve.graph.stage import StageGraph, graph_of, program_of_order
from runner.memory.solve.graph.values import Graph, Order, replayed
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategies.kusumoto import orders_of_sequences
from runner.memory.solve.strategy import SECTION, Candidate, Strategy
from runner.memory.solve.values import Program, Segment, StageChain
from runner.options import Option

__all__ = ["MOST_LAYERS", "STRATEGY", "programs_under", "refuse_long_stages"]

_BUDGETS = 20  # programs are solved for these equal parts of the plain peak
_GAP = 0.01
_NODES = 2000  # of the solver's tree: not a time, so that every rank finds the same
_ORDERS = 1024  # that are kept
_UNLIMITED = 1e6  # seconds
MOST_LAYERS = 20
"""Layers of a stage beyond which the solver may take hours."""
_MOST_LAYERS_ROUNDED = 32


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    """The program that keeps everything, and the cheapest ones of less and less memory."""
    rounding = bool(chain.options.get("rounding", False))
    refuse_long_stages(chain, "checkmate", _MOST_LAYERS_ROUNDED if rounding else MOST_LAYERS)
    name = "checkmate rounding" if rounding else "checkmate"
    yield Candidate(name, (Segment(chain.first, chain.last),))
    stage = graph_of(chain)
    programs = dict.fromkeys(programs_under(stage, chain.in_flight, rounding=rounding))
    yield from (Candidate(name, program) for program in programs)


def programs_under(
    stage: StageGraph, in_flight: int, *, rounding: bool = False, nodes: int = _NODES
) -> Iterator[Program]:
    """A program for each part of the plain peak, down to the first one in which there is none.

    Args:
        stage: the stage.
        in_flight: the most micro-batches whose saved tensors are alive at once.
        rounding: whether the relaxed program is solved, and rounded.
        nodes: limit of the solver's tree.
    """
    others = sum(value.num_bytes for value in stage.graph.values[: stage.num_forward])
    most = replayed(stage.graph, stage.graph.once).peak_bytes + (in_flight - 1) * others
    known = () if rounding or stage.presets else tuple(orders_of_sequences(stage, approximate=True))
    for part in range(_BUDGETS - 1, 0, -1):
        order = _order(stage.graph, most * part // _BUDGETS, in_flight, rounding, nodes, known)
        if order is None:
            return
        yield program_of_order(stage, order)


@lru_cache(maxsize=_ORDERS)
def _order(
    graph: Graph, budget: int, in_flight: int, rounding: bool, nodes: int, known: tuple[Order, ...]
) -> Order | None:
    """The order that a solver finds; equal stages, and plans with other limits in one sweep, are solved once."""
    from runner.memory.solve.graph.checkmate import cheapest_order, rounded_order

    if rounding:
        return rounded_order(graph, budget, seconds=_UNLIMITED, in_flight=in_flight)
    return cheapest_order(graph, budget, seconds=_UNLIMITED, gap=_GAP, nodes=nodes, in_flight=in_flight, known=known)


def refuse_long_stages(chain: StageChain, name: str, most: int) -> None:
    """Raise a RequestError that names the strategy if a stage has more layers than its solver can plan."""
    count = len(chain.layers)
    if count > most:
        why = f"The layers {chain.first} .. {chain.last} are a stage of {count}, for which the solver may take hours"
        rule = f"must not plan stages of more than {most} layers"
        fix = "activation_checkpoint=kusumoto or rotor, or more stages"
        raise RequestError([Problem(f"{SECTION}.name", name, rule, why, fix)])


STRATEGY = Strategy(
    "checkmate",
    FULL.solve,
    source="Jain et al. 2020, Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
    about="the cheapest graph program under memory_limit, by a mixed integer program",
    options=(
        Option(
            "rounding",
            bool,
            "solve the relaxed linear program instead and round what it keeps; null = false",
            example="true",
            required=False,
        ),
    ),
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
    runs_graphs=True,
    searches=True,
)
