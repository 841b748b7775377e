"""Compares the solvers of graphs: seconds by size, and costs beside each other.

python -m runner.recipes.rematerialization.solvers [--sizes 16 32 64] [--graphs 20]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from time import perf_counter

from runner.memory.solve.graph.checkmate import cheapest_order
from runner.memory.solve.graph.lower_sets import least_recomputation, lower_sets, prefix_closures
from runner.memory.solve.graph.values import Graph, Order, Value, replayed, training_graph

__all__ = ["chain_of", "main", "random_forward", "ratios", "seconds_by_size"]

_GAP = 0.01  # how far a solution of the large programs may be from the optimum


def chain_of(count: int) -> list[Value]:
    """The forward of equal layers in a row."""
    return [Value(1.0, 1, (index - 1,) if index else ()) for index in range(count)]


def random_forward(seed: int, count: int) -> list[Value]:
    """A chain with residual connections, and random seconds and bytes."""
    draw = random.Random(seed)
    values: list[Value] = []
    for index in range(count):
        skips = {draw.randrange(index)} if index > 1 and draw.random() < 0.5 else set()
        needs = {index - 1, *skips} if index else set()
        values.append(Value(float(draw.randint(1, 5)), draw.randint(1, 6), tuple(sorted(needs))))
    return values


def seconds_by_size(sizes: Sequence[int]) -> Iterator[list[str]]:
    """For each number of values of a chain and its backward: parts of the plain peak, and what the solver took."""
    for size in sizes:
        forward = chain_of(size // 2)
        graph = training_graph(forward)
        plain = replayed(graph, graph.once)
        for part in (0.75, 0.6):
            budget = int(plain.peak_bytes * part)
            began = perf_counter()
            known = least_recomputation(graph, len(forward), prefix_closures(forward), budget)
            order = cheapest_order(graph, budget, seconds=600.0, gap=_GAP, known=[known] if known else [])
            taken = perf_counter() - began
            cost = "-" if order is None else f"{replayed(graph, order).seconds / plain.seconds:.3f}"
            yield [str(size), f"{part:.2f}", f"{taken:.1f}", cost]


def ratios(graphs: int) -> Iterator[list[str]]:
    """For each random graph in 0.8 and 0.6 of its plain peak: costs by each solver, in those of the plain order."""
    for seed in range(graphs):
        count = 6 + seed % 3
        forward = random_forward(seed, count)
        graph = training_graph(forward)
        plain = replayed(graph, graph.once)
        for part in (0.8, 0.6):
            budget = int(plain.peak_bytes * part)
            found = [
                cheapest_order(graph, budget),
                least_recomputation(graph, count, lower_sets(forward), budget),
                least_recomputation(graph, count, prefix_closures(forward), budget),
            ]
            costs = [_cost(graph, order) / plain.seconds for order in found]
            cells = ["-" if cost == float("inf") else f"{cost:.3f}" for cost in costs]
            yield [str(seed), str(len(graph.values)), f"{part:.1f}", *cells]


def _cost(graph: Graph, order: Order | None) -> float:
    return float("inf") if order is None else replayed(graph, order).seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m runner.recipes.rematerialization.solvers")
    parser.add_argument(
        "--sizes", nargs="*", type=int, default=[16, 32, 64], help="values of the graphs that are timed"
    )
    parser.add_argument("--graphs", type=int, default=20, help="random graphs that are compared")
    asked = parser.parse_args(arguments)
    _print(["values", "of plain peak", "seconds", "cost"], seconds_by_size(asked.sizes))
    names = [
        "graph",
        "values",
        "of plain peak",
        "checkmate",
        "kusumoto",
        "approximate",
    ]
    _print(names, ratios(asked.graphs))
    return 0


def _print(header: Sequence[str], rows: Iterator[list[str]]) -> None:
    print("| " + " | ".join(header) + " |\n" + "| --- " * len(header) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
    print()


if __name__ == "__main__":
    raise SystemExit(main())
