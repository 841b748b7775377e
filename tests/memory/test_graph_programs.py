"""Graph programs: what they run again, with the same bits and the predicted peak, and what they refuse."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from plan_profiles import layer, model
from test_budgets import SCALARS, grid, planned
from torch import Tensor, nn

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.memory.apply.install import install
from runner.memory.solve.graph.checkmate import cheapest_order, order_of_kept
from runner.memory.solve.graph.stage import StageGraph, graph_of, program_of_order
from runner.memory.solve.graph.values import Cost, Graph, replayed
from runner.memory.solve.program import forwards
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import GraphProgram, Segment, StageChain, StageProgram
from runner.model.layers import StageModule, build_stage, layers_of
from runner.model.live_tracker import LiveTracker
from runner.plan.choices import program_cost
from runner.profiling.model import profile_layers
from runner.recipes.rematerialization.models import MODELS, Task


@dataclass(frozen=True)
class Bench:
    """A model as one stage.

    Args:
        task: makes its batch and its loss.
        stage: the stage, which is copied for each run.
        chain: its profile.
        graph: its graph.
    """

    task: Task
    stage: StageModule
    chain: StageChain
    graph: StageGraph


class _Both(nn.Module):
    """Gives two tensors to later layers; the second is needed much later."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.relu(self.norm(self.linear(value)))
        return made * 2, made


class _Inside(nn.Module):
    """Changes the first tensor and passes the second one on, which it does not read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.dropout(torch.tanh(self.linear(pair[0]))), pair[1]


class _Join(nn.Module):
    """Adds the two tensors."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1].exp()


def _skipping() -> Task:
    """Two skips over layers with dropout and batch norm."""
    generator = torch.Generator().manual_seed(1)
    width, batch = 24, 64

    def build() -> nn.Sequential:
        over = [_Both(width), _Inside(width), _Inside(width), _Join()]
        return nn.Sequential(nn.Linear(width, width), *over, *copy.deepcopy(over), nn.Linear(width, width))

    points = torch.randn(batch, width, generator=generator), torch.randn(batch, width, generator=generator)
    return Task(build, points, _squares)


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


TASKS: dict[str, Callable[[], Task]] = {"skips": _skipping, "U-Net": MODELS["U-Net"], "ResNet": MODELS["ResNet"]}


@cache
def bench(name: str) -> Bench:
    task = TASKS[name]()
    torch.manual_seed(0)
    sources = layers_of(task.build(), 0)
    profile = profile_layers(sources, *task.batch, task.loss, torch.float32)
    chain = StageChain(profile, 0, len(sources) - 1)
    return Bench(task, build_stage(sources, 0, len(sources) - 1), chain, graph_of(chain))


def some_program(made: StageGraph, seed: int) -> GraphProgram:
    """A program that keeps some of the forward's values until the end, and computes the others when they are needed."""
    draw = random.Random(seed)
    kept = {index for index in range(made.num_forward) if draw.random() < 0.4}
    return program_of_order(made, order_of_kept(made.graph, lambda stage, index: index in kept))


def changing_program(made: StageGraph, seed: int) -> GraphProgram:
    """A program that keeps other values from each backward to the next one, as a solver's may."""

    def kept(stage: int, index: int) -> bool:
        return random.Random(f"{seed} {stage} {index}").random() < 0.5

    return program_of_order(made, order_of_kept(made.graph, kept))


@dataclass(frozen=True)
class Ran:
    """One forward and backward: the peak, the forwards of each layer, and gradients with buffers."""

    peak: int
    calls: Counter[int]
    result: tuple[Tensor, ...]


def ran(of: Bench, program: StageProgram | None, *, seeded: bool = True) -> Ran:
    stage, calls = copy.deepcopy(of.stage), Counter[int]()
    if program is not None:
        install(stage, program)
    for index, each in enumerate(stage.layers):
        each.register_forward_pre_hook(lambda module, given, index=index: calls.update([index]))
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs, targets = of.task.batch
    torch.manual_seed(7)
    with LiveTracker() as tracker:
        before = (lambda index: torch.manual_seed(index)) if seeded else None
        torch.autograd.backward(of.task.loss(stage(inputs, before), targets))
    gradients = (parameter.grad for parameter in stage.parameters())
    return Ran(tracker.peak, calls, tuple(each for each in (*gradients, *stage.buffers()) if each is not None))


@cache
def plain(name: str, *, seeded: bool = True) -> Ran:
    return ran(bench(name), None, seeded=seeded)


def runs_as_predicted(name: str, program: StageProgram) -> Ran:
    """Run a program, which gives the bits of the plain run with the predicted peak and as many forwards as it says."""
    of, expected = bench(name), plain(name)
    found = ran(of, program)
    assert len(found.result) == len(expected.result)
    assert all(map(torch.equal, found.result, expected.result))
    assert found.calls.total() == forwards(program)
    predicted = program_cost(of.chain, program).peak_bytes
    assert 0.99 * predicted <= found.peak <= predicted + SCALARS
    return found


@pytest.mark.parametrize(("name", "seed"), [("skips", 0), ("skips", 1), ("U-Net", 0), ("ResNet", 1)])
def test_any_program_gives_the_same_bits_with_the_predicted_peak_and_forwards(name: str, seed: int) -> None:
    of = bench(name)
    program = some_program(of.graph, seed)
    calls = runs_as_predicted(name, program).calls
    assert calls == Counter(range(len(of.stage.layers))) + Counter(program.reruns)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["skips", "U-Net"])
def test_what_is_kept_may_change_from_each_backward_to_the_next(name: str, seed: int) -> None:
    of = bench(name)
    program = changing_program(of.graph, seed)
    calls = runs_as_predicted(name, program).calls
    assert calls == Counter(range(len(of.stage.layers))) + Counter(program.reruns)


def test_solvers_run_each_backward_once() -> None:
    """Also if a backward takes no seconds, so that a second one would cost a solver nothing."""
    made = bench("skips").graph
    free = replace(made.graph, values=tuple(replace(value, seconds=0.0) for value in made.graph.values))
    most = replayed(free, free.once).peak_bytes
    for part in (9, 7, 6):
        order = cheapest_order(free, most * part // 10, nodes=20)
        if order is not None:
            assert [index for index in order if index in free.backwards] == sorted(free.backwards)


def test_an_order_with_a_backward_that_runs_twice_is_no_program() -> None:
    made = bench("skips").graph
    with pytest.raises(ValueError, match="a backward runs once, and the order has it twice"):
        program_of_order(made, (*made.graph.once, len(made.graph.values) - 1))


def test_random_numbers_are_those_of_the_first_run_where_nobody_seeds() -> None:
    expected = plain("skips", seeded=False)
    for seed in range(3):
        found = ran(bench("skips"), some_program(bench("skips").graph, seed), seeded=False)
        assert all(map(torch.equal, found.result, expected.result))


def test_a_tensor_that_a_layer_passes_on_is_not_needed_to_run_it_again() -> None:
    made = bench("skips").graph
    inside = made.layers.index(2)  # the run of the first layer that passes a skip on
    (need,) = made.graph.values[inside].needs
    read, passed = made.outputs[1]
    assert made.storages[need] == read
    assert passed in made.outputs[2]


def test_a_forward_without_gradients_keeps_nothing() -> None:
    of = bench("skips")
    stage = copy.deepcopy(of.stage)
    install(stage, some_program(of.graph, 0))
    with torch.no_grad():
        assert not stage(of.task.batch[0]).requires_grad


def test_a_second_backward_is_refused() -> None:
    of = bench("skips")
    stage = copy.deepcopy(of.stage)
    install(stage, some_program(of.graph, 0))
    output = stage(of.task.batch[0]).sum()
    output.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match="a second backward through one forward is not possible under a graph program"
    ):
        output.backward()


def test_a_layer_that_changes_its_input_in_place_is_refused() -> None:
    sources = layers_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), 0)
    stage = build_stage(sources, 0, 2)
    chain = StageChain(profile_layers(sources, torch.ones(2, 4), torch.ones(2, 4), nn.MSELoss(), torch.float32), 0, 2)
    install(stage, some_program(graph_of(chain), 1))
    with pytest.raises(RuntimeError, match="layer 1 changes its input in place"):
        stage(torch.ones(2, 4))


def all_costs(graph: Graph) -> list[Cost]:
    """The costs of every choice of what is kept between stages."""
    places = [
        (stage, index)
        for stage, own in enumerate(graph.stages)
        for index in range(own.start)
        if graph.values[index].num_bytes
    ]
    costs = []
    for bits in product((False, True), repeat=len(places)):
        chosen = dict(zip(places, bits, strict=True))
        order = order_of_kept(graph, lambda stage, index, chosen=chosen: chosen.get((stage, index), False))  # type: ignore[misc]
        try:
            costs.append(replayed(graph, order))
        except ValueError:
            continue  # something is kept that was not there
    return costs


@pytest.mark.parametrize("seed", range(2))
def test_checkmate_is_the_cheapest_of_all_that_a_stage_may_keep(seed: int) -> None:
    draw = random.Random(seed)
    rows = [
        layer(
            saved_bytes=draw.randint(25, 60),
            output_bytes=draw.randint(5, 20),
            unsaved_forward_bytes=draw.randint(20, 70),
            forward_seconds=float(draw.randint(1, 4)),
        )
        for _ in range(3)
    ]
    graph = graph_of(StageChain(model(rows), 0, 1)).graph
    costs = all_costs(graph)
    for budget in {cost.peak_bytes for cost in costs}:
        expected = min(cost.seconds for cost in costs if cost.peak_bytes <= budget)
        order = cheapest_order(graph, budget)
        assert order is not None
        assert replayed(graph, order).seconds == pytest.approx(expected)
    assert cheapest_order(graph, min(cost.peak_bytes for cost in costs) - 1) is None


def programs_of(name: str, of: Bench, **options: Any) -> list[GraphProgram]:
    make = STRATEGIES[name].candidates
    assert make is not None
    found = [each.program for each in make(StageChain(of.chain.profile, of.chain.first, of.chain.last, options))]
    assert found[0] == (Segment(of.chain.first, of.chain.last),)
    return [program for program in found if isinstance(program, GraphProgram)]


def test_approximate_lower_sets_are_all_where_each_layer_needs_the_one_before() -> None:
    of = bench("skips")
    assert programs_of("kusumoto", of) == programs_of("kusumoto", of, approximate=True)


def test_what_kusumoto_runs_again_it_runs_once() -> None:
    for program in programs_of("kusumoto", bench("U-Net")):
        assert max(Counter(program.reruns).values(), default=0) <= 1


def refused(*words: str) -> str:
    (problem,) = rules(resolve(["model=mlp", *words]))
    return problem.line()


@pytest.mark.parametrize("policy", ["checkmate", "coop", "rockmate"])
def test_other_hooks_and_compiled_layers_are_refused(policy: str) -> None:
    chosen = f"activation_checkpoint={policy}"
    assert refused(chosen, "compile=true").startswith(f"compile = true: must be false with {chosen}.")
    moved = refused(chosen, "offload=activations_save_on_cpu")
    assert moved.startswith(f"offload.activations = save_on_cpu: must not meet {chosen}.")


def test_auto_does_not_wait_for_solvers_of_graphs() -> None:
    (choice,) = planned("auto", 1, grid(1, 6, "1f1b")[2]).activations.choices
    assert not any(offer.name.startswith(("checkmate", "kusumoto", "monet")) for offer in choice.offers)
