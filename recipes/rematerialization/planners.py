"""What the strategies take to plan: seconds by the number of layers and by memory, and the powers that fit them.

python -m runner.recipes.rematerialization.planners [--planners rotor …] [--write-readme]
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from time import process_time

from runner.memory.solve.policies import solve, strategy_of
from runner.memory.solve.values import PolicyOptions, StageChain
from runner.profile import BoundaryTensor, LayerProfile, ModelProfile
from runner.recipes.schedules.tables import replace_block

__all__ = ["PLANNERS", "Planner", "chain_of", "exponent", "main", "planning_seconds", "rows"]

_HERE = Path(__file__).parent
_TIMES = 3  # of which the least counts


@dataclass(frozen=True)
class Planner:
    """A strategy whose planning is timed.

    Args:
        complexity: what its publication prints, or what follows from its recursion.
        layers: the numbers of layers for which it plans.
        strategy: its name.
        memory: the option that counts memory; empty = it has none.
        sizes: values of that option.
        options: other options.
    """

    complexity: str
    layers: tuple[int, ...]
    strategy: str
    memory: str = ""
    sizes: tuple[int, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)


PLANNERS: Mapping[str, Planner] = {
    "chen_sqrt": Planner("L", (1000, 2000, 4000), "chen_sqrt"),
    "chen_greedy": Planner("L for each bound that is tried", (25, 50, 100), "chen_greedy"),
    "chen_recursive": Planner("L", (1000, 2000, 4000), "chen_recursive", options={"cuts": 2}),
    "bisect": Planner("L", (1000, 2000, 4000), "bisect"),
    "revolve": Planner("L", (250, 500, 1000), "revolve", "slots", (10, 20, 40)),
    "het_time": Planner("L^3 M, or L^2 M", (100, 200, 400), "het_time", "slots", (4, 8, 16)),
    "bptt msm": Planner("L^2 M", (250, 500, 1000), "bptt", "states", (25, 50, 100), {"variant": "msm"}),
    "rotor": Planner("L^3 M", (50, 100, 200), "rotor", "resolution", (250, 500, 1000)),
    "rockmate": Planner("that of rotor times the options of a block", (8, 16, 32), "rockmate"),
    "kusumoto": Planner("T S^2, of S lower sets", (16, 32, 64), "kusumoto"),
    "kusumoto approximate": Planner("T L^2", (16, 32, 64), "kusumoto", options={"approximate": True}),
    "treewidth": Planner("2^O(w) L + O(w L log L)", (16, 32, 64), "treewidth"),
    "dtr": Planner("L^2 if each eviction looks at everything", (16, 32, 64), "dtr"),
    "mimose": Planner("L log L for each size of the input", (16, 32, 64), "mimose"),
}
"""By what the table shows. L: layers; M: units of memory; T: units of time; w: width of the graph. checkmate and monet
are integer programs of L^2 variables, which no power fits; :mod:`.solvers` times them."""


def chain_of(layers: int, seed: int = 0) -> StageChain:
    """A chain in which each layer needs the one before, and all differ in bytes and seconds."""
    draw = random.Random(seed)

    def layer(number: int) -> LayerProfile:
        output, inner, seconds = draw.randint(10, 40), draw.randint(5, 80), draw.uniform(0.5, 2.0)
        return LayerProfile(
            name=str(number), num_parameters=0, weight_bytes=0, gradient_bytes=0, saved_bytes=output + inner,
            output_bytes=output, forward_transient_bytes=5, backward_transient_bytes=output, forward_flops=seconds,
            backward_flops=2 * seconds, forward_seconds=seconds, backward_seconds=2 * seconds,
            unsaved_forward_bytes=output + 5, output=(BoundaryTensor(number, output, output),),
            saves=(number - 1, number),
        )  # fmt: skip

    loss = LayerProfile("loss", 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    profile = ModelProfile(tuple(map(layer, range(layers))), loss, 1, 10, 1, "estimated", 0.0, 0.0)
    return StageChain(profile, 0, layers - 1)


def planning_seconds(planner: Planner, layers: int, memory: int | None) -> float:
    """The processor's seconds in which a strategy makes all its programs of one chain, the least of several times."""
    given = {**planner.options, **({planner.memory: memory} if planner.memory else {})}
    chain = chain_of(layers)
    chain = StageChain(chain.profile, chain.first, chain.last, given)
    strategy = strategy_of(PolicyOptions(planner.strategy))
    taken = []
    for _ in range(_TIMES):
        began = process_time()
        if strategy.candidates is None:
            solve(chain.profile, [(chain.first, chain.last)], PolicyOptions(planner.strategy, None, **given))
        else:
            list(strategy.candidates(chain))
        taken.append(process_time() - began)
    return min(taken)


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The power of the size with which the seconds grow, by the least squares of their logarithms."""
    return linear_regression(list(map(math.log, sizes)), list(map(math.log, seconds))).slope


def rows(names: Sequence[str] = tuple(PLANNERS)) -> Iterator[list[str]]:
    """The lines of the table: strategy, complexity, largest L and M, seconds there, and both powers."""
    for name in names:
        planner = PLANNERS[name]
        memory = planner.sizes[-1] if planner.sizes else None
        by_layers = [planning_seconds(planner, layers, memory) for layers in planner.layers]
        power = "-"
        if planner.sizes:
            by_memory = [planning_seconds(planner, planner.layers[-1], size) for size in planner.sizes]
            power = f"{exponent(planner.sizes, by_memory):.1f}"
        sizes = [f"{planner.layers[0]} to {planner.layers[-1]}", f"{planner.sizes[0]} to {memory}" if memory else "-"]
        fitted = [f"{by_layers[-1]:.3g}", f"{exponent(planner.layers, by_layers):.1f}", power]
        yield [f"`{name}`", planner.complexity, *sizes, *fitted]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table or write it into the recipe's page."""
    parser = argparse.ArgumentParser(prog="python -m runner.recipes.rematerialization.planners")
    parser.add_argument("--planners", nargs="+", choices=list(PLANNERS), default=list(PLANNERS))
    parser.add_argument("--write-readme", action="store_true", help="put the table into the recipe's page")
    asked = parser.parse_args(arguments)
    header = ["strategy", "complexity", "L", "M", "seconds at the largest", "power of L", "power of M"]
    lines = [header, ["---"] * len(header)]
    for row in rows(asked.planners):
        lines.append(row)
        print(" | ".join(row), flush=True)
    if asked.write_readme:
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        replace_block(_HERE / "README.md", "planners", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
