"""Monet: the cheapest of all ways on small graphs, and layers that run again from outputs of their operators."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from plan_profiles import layer, model
from test_budgets import SCALARS
from test_graph_programs import TASKS, Bench, bench, plain, ran
from torch import Tensor, nn

from runner.memory.apply.install import install
from runner.memory.solve.graph.checkmate import cheapest_order, order_of_kept
from runner.memory.solve.graph.stage import StageGraph, graph_of, operator_ways, program_of_order
from runner.memory.solve.graph.values import Graph, replayed
from runner.memory.solve.program import forwards
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import GraphProgram, StageChain
from runner.model.layers import build_stage, layers_of
from runner.plan.choices import program_cost
from runner.profile import LayerProfile, ModelProfile, Recomputation
from runner.profiling.model import profile_layers
from runner.recipes.rematerialization.models import MODELS
from runner.recipes.rematerialization.paced import with_flops_as_seconds

BITS = {**TASKS, "ruDALL-E": MODELS["ruDALL-E"]}


def random_layer(draw: random.Random, ways: int) -> LayerProfile:
    """A layer with some presets of operators whose outputs may be kept."""
    saved = draw.randint(30, 60)
    again = {"": Recomputation(0, saved, 100.0)}
    for preset in ("matmuls", "attention", "convolutions")[:ways]:
        kept = draw.randint(5, 25)
        flops = float(draw.choice([0, 20, 50, 80]))
        again[preset] = Recomputation(kept, saved - kept, flops, second_peak_bytes=draw.randint(20, 60))
    return layer(
        saved_bytes=saved,
        output_bytes=draw.randint(5, 20),
        unsaved_forward_bytes=draw.randint(20, 70),
        forward_seconds=float(draw.randint(1, 5)),
        recomputation=again,
    )


def random_stage(seed: int, count: int, ways: int) -> StageChain:
    draw = random.Random(seed)
    return StageChain(model([random_layer(draw, ways) for _ in range(count + 1)]), 0, count - 1)


Alive = frozenset[int]


def least_seconds(graph: Graph, budget: int) -> float:
    """The seconds of the cheapest of all ways: each stage computes or skips each value in turn, and drops any."""
    values, found = graph.values, {frozenset[int](): 0.0}
    for own in graph.stages:
        reached = {(alive, frozenset[int]()): seconds for alive, seconds in found.items()}  # with what ran in the stage
        for index in range(own.stop):
            reached = step(graph, budget, reached, index, is_own=index in own)
        found = {}
        for (alive, _), seconds in reached.items():
            sized = frozenset(each for each in alive if not values[each].is_run)
            found[sized] = min(seconds, found.get(sized, float("inf")))
    return min(found.values(), default=float("inf"))


def step(
    graph: Graph, budget: int, before: dict[tuple[Alive, Alive], float], index: int, *, is_own: bool
) -> dict[tuple[Alive, Alive], float]:
    """The states after a value was computed or not, and after any values were dropped."""
    value, left = graph.values[index], [at for at, each in enumerate(graph.values) if each.is_optional]
    found: dict[tuple[Alive, Alive], float] = {}

    def reach(alive: Alive, runs: Alive, seconds: float) -> None:
        if seconds < found.get((alive, runs), float("inf")):
            found[alive, runs] = seconds
            for each in alive:
                reach(alive - {each}, runs, seconds)

    for (alive, runs), seconds in before.items():
        may = is_own != value.is_run if value.is_optional else True
        if not is_own or value.is_optional:
            found[alive, runs] = min(seconds, found.get((alive, runs), float("inf")))
        is_other = value.is_optional and not value.is_run
        rivals = {need for other in graph.instead for need in graph.values[other].needs if need in left}
        same = {each for each in rivals if graph.values[each].needs == value.needs} if is_other else set()
        if may and not same & alive and set(value.needs) <= alive | runs:
            held = sum(graph.values[each].num_bytes for each in alive | {index})
            if held + value.transient_bytes <= budget:
                used = {need for need in value.needs if value.is_run and graph.values[need].is_optional}
                now = runs | {graph.instead.get(index, index)} if value.is_run else runs
                reach(alive - used if value.is_run else alive | {index}, now, seconds + value.seconds)
    return found


def cost_within(graph: Graph, budget: int) -> float:
    order = cheapest_order(graph, budget)
    if order is None:
        return float("inf")
    cost = replayed(graph, order)
    assert cost.peak_bytes <= budget
    return cost.seconds


def budgets_of(graph: Graph, count: int) -> list[int]:
    most = replayed(graph, graph.once).peak_bytes
    return [most * (count + 2 - part) // (count + 2) for part in range(count)]


def is_cheapest(seed: int, layers: int, ways: int, budgets: int) -> int:
    """Compare with all ways, and with what checkmate finds; return at how many budgets it is cheaper than that."""
    chain = random_stage(seed, layers, ways)
    with_ways, without = graph_of(chain, with_operators=True).graph, graph_of(chain).graph
    better = 0
    for budget in budgets_of(without, budgets):
        found, known = cost_within(with_ways, budget), cost_within(without, budget)
        assert found == pytest.approx(least_seconds(with_ways, budget))
        assert known == pytest.approx(least_seconds(without, budget))
        assert found <= known
        better += found < known
    return better


def test_it_is_the_cheapest_of_all_ways_of_small_stages() -> None:
    assert sum(is_cheapest(seed, 2, 2, 4) for seed in range(2)) > 0


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("layers", "ways"), [(2, 3), (3, 1), (3, 2), (4, 1)])
def test_it_is_the_cheapest_of_all_ways(layers: int, ways: int) -> None:
    assert sum(is_cheapest(seed, layers, ways, 4) for seed in range(3)) > 0


def some_program(made: StageGraph, seed: int) -> GraphProgram:
    """A program that keeps some tensors and graphs to the end, and runs some layers again from their operators."""
    draw, first = random.Random(seed), made.num_forward
    kept = {at for at in range(first) if draw.random() < 0.4 and at not in made.presets}
    ways: dict[int, int] = {}
    for other, run in made.graph.instead.items():
        if draw.random() < 0.8:
            ways.setdefault(run, other)
    own = {other: made.graph.backward[run] - first + 1 for run, other in ways.items()}
    when = {other: draw.choice([stage, max(1, stage - 1)]) for other, stage in own.items()}
    until = {need: when[other] for other in when for need in made.graph.values[other].needs if need in made.presets}

    def keeps(stage: int, at: int) -> bool:
        return stage <= until.get(at, 0) if at in made.presets else at in kept or at >= first

    return program_of_order(made, order_of_kept(made.graph, keeps, lambda stage, at: when.get(at) == stage))


@cache
def with_operators(name: str) -> tuple[Bench, StageGraph]:
    TASKS.setdefault(name, BITS[name])
    return bench(name), graph_of(bench(name).chain, with_operators=True)


def same_bits_and_peak(name: str, seed: int) -> None:
    of, graph = with_operators(name)
    program = some_program(graph, seed)
    assert any(rerun.given for moment in program.backwards for rerun in moment.before)
    found, expected = ran(of, program), plain(name)
    assert all(map(torch.equal, found.result, expected.result))
    assert found.calls.total() == forwards(program)
    predicted = program_cost(of.chain, program).peak_bytes
    assert 0.99 * predicted <= found.peak <= predicted + SCALARS


def test_layers_run_again_from_their_operators_with_the_same_bits_and_the_predicted_peak() -> None:
    same_bits_and_peak("U-Net", 0)


def test_random_numbers_are_those_of_the_first_run_where_nobody_seeds() -> None:
    of, graph = with_operators("U-Net")
    found = ran(of, some_program(graph, 0), seeded=False)
    assert all(map(torch.equal, found.result, plain("U-Net", seeded=False).result))


def test_an_input_that_only_convolutions_read_need_not_be_there() -> None:
    graph = with_operators("U-Net")[1]
    inside = next(other for other, run in graph.graph.instead.items() if graph.layers[run] == 1)
    (left,) = graph.graph.values[inside].needs
    assert graph.presets[left] == graph.presets[inside] == "convolutions"


def profile_of(module: nn.Sequential, inputs: Tensor) -> ModelProfile:
    return profile_layers(layers_of(module, 0), inputs, torch.zeros(()), _mean, torch.float32)


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean() + target


def _convolutions(*, inplace: bool) -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=inplace), nn.Tanh()))


def test_outputs_that_are_changed_in_place_are_not_kept() -> None:
    pictures = torch.randn(2, 3, 8, 8)
    assert list(operator_ways(profile_of(_convolutions(inplace=False), pictures).layers[0])) == ["convolutions"]
    assert not operator_ways(profile_of(_convolutions(inplace=True), pictures).layers[0])


class _Fickle(nn.Module):
    """Changes what its convolution has made in place, from its second forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.runs = nn.Conv2d(3, 4, 3), 0

    def forward(self, value: Tensor) -> Tensor:
        self.runs += 1
        made = self.convolution(value)
        return torch.tanh(made.mul_(2) if self.runs == 1 else made * 2) * 3


def test_a_kept_output_that_is_changed_in_place_ends_the_run() -> None:
    stage = build_stage(layers_of(nn.Sequential(nn.Conv2d(3, 3, 1), _Fickle(), nn.Tanh()), 0), 0, 2)
    program = some_fickle_program()
    install(stage, program)
    with pytest.raises(RuntimeError, match="layer 1 changes the output of an operator in place that was kept"):
        stage(torch.randn(2, 3, 8, 8)).sum().backward()


def some_fickle_program() -> GraphProgram:
    """A program that runs the layer in the middle again from its operators."""
    fickle = _Fickle()
    fickle.runs = 10
    module = nn.Sequential(nn.Conv2d(3, 3, 1), fickle, nn.Tanh())
    chain = StageChain(profile_of(module, torch.randn(2, 3, 8, 8)), 0, 2)
    made = graph_of(chain, with_operators=True)
    (inside,) = (other for other, run in made.graph.instead.items() if made.layers[run] == 1)
    own = made.graph.backward[made.graph.instead[inside]] - made.num_forward + 1

    def keeps(stage: int, at: int) -> bool:
        if at in made.presets:
            return at in made.graph.values[inside].needs and stage <= own
        return made.layers[at] != 1 or at in made.storages or at >= made.num_forward

    return program_of_order(made, order_of_kept(made.graph, keeps, lambda stage, at: (stage, at) == (own, inside)))


def test_its_offers_contain_those_of_checkmate_and_keep_operators() -> None:
    whole = with_operators("U-Net")[0].chain
    chain = replace(whole, profile=with_flops_as_seconds(whole.profile, 1.0), first=0, last=4)
    offers = {name: [each.program for each in make(name)(chain)] for name in ("checkmate", "monet")}
    assert set(offers["checkmate"]) <= set(offers["monet"])
    more = [each for each in offers["monet"] if isinstance(each, GraphProgram) and any(each.save_ops)]
    assert more


def make(name: str):  # type: ignore[no-untyped-def]
    found = STRATEGIES[name].candidates
    assert found is not None
    return found
