"""The strategy that finds a stage's cheapest graph programs in less and less memory by mixed integer programs.

A stage of many layers is solved in parts of few, see :mod:`runner.memory.solve.graph.parts`. No program depends on the
memory limit, nor on the stage in which a part lies, so that alike parts are solved once.

Source: Jain et al. 2020, Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain as joined
from math import ceil

from runner.memory.solve.build import equal_parts
from runner.memory.solve.graph.parts import Part, orders_of_parts
from runner.memory.solve.graph.stage import graph_of, program_of_order
from runner.memory.solve.graph.values import Graph, Order, replayed
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategies.kusumoto import orders_of_sequences
from runner.memory.solve.strategies.rotor import STRATEGY as ROTOR
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import Program, StageChain
from runner.options import Option

__all__ = ["PROGRAM_LAYERS", "STRATEGY", "programs_of"]

_BUDGETS = 20  # programs are solved for these equal shares of a plain peak
_LIMITS = 40  # for which the parts of a stage are put together
_GAP = 0.01
_NODES = 2000  # of the solver's tree: not a time, so that every rank finds the same
_ORDERS = 4096  # that are kept
_UNLIMITED = 1e6  # seconds
_LAYERS = 3  # of a part
_MOST_LAYERS = 20  # for which the solver takes minutes
_IN_FLIGHT = 1, 4  # what a part keeps may count as often: as if only its peak mattered, or what it keeps above all


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    """The program that keeps everything, and the cheapest ones of less and less memory."""
    assert ROTOR.candidates is not None
    yield from (Candidate("checkmate", each.program) for each in ROTOR.candidates(replace(chain, options={})))
    yield from (Candidate("checkmate", program) for program in dict.fromkeys(programs_of(chain)))


def programs_of(chain: StageChain, *, with_operators: bool = False, nodes: int = _NODES) -> Iterator[Program]:
    """Programs of a stage for less and less memory.

    Args:
        chain: the stage.
        with_operators: whether layers may keep outputs of chosen operators.
        nodes: limit of the solver's tree for each integer program.
    """
    stage = graph_of(chain, with_operators=with_operators)
    places = equal_parts(
        chain.first, chain.last, ceil(len(chain.layers) / int(chain.options.get("program_layers", _LAYERS)))
    )
    if len(places) == 1:
        known = () if stage.presets else tuple(orders_of_sequences(stage, approximate=True))
        orders = _orders_under(stage.graph, chain.in_flight, nodes, known)
    else:
        chains = (replace(chain, first=first, last=last) for first, last in places)
        alone = [graph_of(each, with_operators=with_operators, followed=each.last < chain.last) for each in chains]
        parts = [Part(each, _orders_of_part(each.graph, nodes)) for each in alone]
        orders = orders_of_parts(stage, parts, chain.in_flight, _LIMITS)
    yield from (program_of_order(stage, order) for order in orders)


@lru_cache(maxsize=_ORDERS)
def _orders_of_part(graph: Graph, nodes: int) -> tuple[Order, ...]:
    """The orders of a part, of which those of the whole stage choose; alike parts of all stages are solved once."""
    solved = (_orders_under(graph, in_flight, nodes) for in_flight in _IN_FLIGHT)
    return tuple(dict.fromkeys((graph.once, *joined.from_iterable(solved))))


def _orders_under(graph: Graph, in_flight: int, nodes: int, known: tuple[Order, ...] = ()) -> Iterator[Order]:
    """An order for each part of the plain peak, down to the first one in which there is none."""
    others = sum(graph.values[index].num_bytes for index in graph.stages[0])
    most = replayed(graph, graph.once).peak_bytes + (in_flight - 1) * others
    for part in range(_BUDGETS - 1, 0, -1):
        order = _order(graph, most * part // _BUDGETS, in_flight, nodes, known)
        if order is None:
            return
        yield order


@lru_cache(maxsize=_ORDERS)
def _order(graph: Graph, budget: int, in_flight: int, nodes: int, known: tuple[Order, ...]) -> Order | None:
    """The order that a solver finds; equal parts, and plans with other limits in one sweep, are solved once."""
    from runner.memory.solve.graph.checkmate import cheapest_order

    return cheapest_order(graph, budget, seconds=_UNLIMITED, gap=_GAP, nodes=nodes, in_flight=in_flight, known=known)


PROGRAM_LAYERS = Option(
    "program_layers",
    int,
    f"layers of a part that one integer program solves; null = {_LAYERS}",
    example="4",
    rule=f"must be from 1 to {_MOST_LAYERS}",
    breaks=lambda layers: not 1 <= layers <= _MOST_LAYERS,
    fix=str(_LAYERS),
    required=False,
)
"""The key that ``checkmate`` and ``monet`` have in common."""

STRATEGY = Strategy(
    "checkmate",
    FULL.solve,
    source="Jain et al. 2020, Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
    about="the cheapest graph programs under memory_limit, by mixed integer programs",
    options=(PROGRAM_LAYERS,),
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
    runs_graphs=True,
)
