"""Stages that drop what they save while they run: the same bits, and no more memory than the pool with a layer's."""

from __future__ import annotations

import copy

import pytest
import torch
from test_budgets import SCALARS
from test_graph_programs import Bench, bench, plain, refused
from torch import Tensor, nn

from runner.memory.apply import evicting
from runner.memory.apply.install import install
from runner.memory.apply.operators import Value
from runner.memory.solve.evicting import EvictingProgram
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import StageChain
from runner.model.layers import StageModule, build_stage, layers_of
from runner.model.live_tracker import LiveTracker
from runner.plan.choices import program_cost


def programs(of: Bench, score: str = "full", in_flight: int = 1) -> list[EvictingProgram]:
    make = STRATEGIES["dtr"].candidates
    assert make is not None
    options = {"score": score, "online": True}
    found = make(StageChain(of.chain.profile, of.chain.first, of.chain.last, options, in_flight=in_flight))
    return [each.program for each in found if isinstance(each.program, EvictingProgram)]


def ran(of: Bench, program: EvictingProgram, *, seeded: bool = True) -> tuple[int, list[Tensor]]:
    """The peak of one forward and backward, and gradients with buffers."""
    stage = copy.deepcopy(of.stage)
    install(stage, program)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs, targets = of.task.batch
    torch.manual_seed(7)
    with LiveTracker() as tracker:
        before = (lambda index: torch.manual_seed(index)) if seeded else None
        torch.autograd.backward(of.task.loss(stage(inputs, before), targets))
    gradients = [parameter.grad for parameter in stage.parameters()]
    return tracker.peak, [each for each in (*gradients, *stage.buffers()) if each is not None]


@pytest.mark.parametrize(("name", "score"), [("skips", "lru"), ("U-Net", "full")])
def test_gradients_are_the_same_bits_and_the_peak_is_within_the_predicted_one(name: str, score: str) -> None:
    of, expected = bench(name), plain(name)
    found = programs(of, score)
    assert len(found) > 5
    for program in found[:: max(1, len(found) // 4)]:
        peak, result = ran(of, program)
        assert len(result) == len(expected.result)
        assert all(map(torch.equal, result, expected.result))
        predicted = program_cost(of.chain, program).peak_bytes
        assert peak <= predicted + SCALARS


def test_costs_around_a_value_are_those_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept until something around the value changes."""
    kept, asked = evicting.Pool.cost_around, []

    def checked(pool: evicting.Pool, value: Value) -> float:
        found = kept(pool, value)
        known, pool._costs = pool._costs, {}
        asked.append((found, kept(pool, value)))
        pool._costs = known
        return found

    monkeypatch.setattr(evicting.Pool, "cost_around", checked)
    for program in programs(bench("U-Net"))[::9]:
        ran(bench("U-Net"), program)
    assert len(asked) > 100
    assert [pair for pair in asked if pair[0] != pair[1]] == []


def test_random_numbers_are_those_of_the_first_run_where_nobody_seeds() -> None:
    of = bench("skips")
    _, result = ran(of, programs(of)[-1], seeded=False)
    assert all(map(torch.equal, result, plain("skips", seeded=False).result))


def small(*layers: nn.Module) -> StageModule:
    torch.manual_seed(3)
    return build_stage(layers_of(nn.Sequential(*layers), 0), 0, len(layers) - 1)


def tiny(stage: StageModule, pool_bytes: int) -> EvictingProgram:
    return EvictingProgram(0, stage.last_layer, "full", pool_bytes, 1, (0,) * (stage.last_layer + 1))


def gradients_of(stage: StageModule, given: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    stage(given).square().sum().backward()
    return [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]


def test_operators_in_place_and_views_are_run_again() -> None:
    class InPlace(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            made = value * 3
            made[:, :2].mul_(0.5)
            return made.view(2, -1).t().reshape(8, 8).mul(2).relu_() * made.exp()

    layers = [nn.Linear(8, 8), InPlace(), nn.Dropout(0.4), nn.Linear(8, 8), nn.Hardtanh(inplace=True), nn.Linear(8, 8)]
    given = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    stage = small(*layers)
    expected = gradients_of(copy.deepcopy(stage), given)
    install(stage, tiny(stage, 4 * 8 * 8 * 4))
    assert all(map(torch.equal, gradients_of(stage, given), expected))


def test_a_saved_tensor_that_is_changed_in_place_is_refused() -> None:
    class Changes(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value.exp().add_(1)  # exp needs its result

    stage = small(nn.Linear(8, 8), Changes())
    install(stage, tiny(stage, 10**6))
    with pytest.raises(RuntimeError, match="changes a tensor in place that a backward needs as it was"):
        stage(torch.ones(8, 8))


def test_a_pool_in_which_one_tensor_has_no_room_is_told() -> None:
    stage = small(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    install(stage, tiny(stage, 100))
    with pytest.raises(RuntimeError, match="memory_limit leaves 100 to them"):
        stage(torch.ones(8, 8)).sum().backward()


def test_a_second_backward_is_possible() -> None:
    of = bench("skips")
    stage = copy.deepcopy(of.stage)
    install(stage, programs(of)[-1])
    output = stage(of.task.batch[0], torch.manual_seed).sum()
    weights = list(stage.parameters())
    first = torch.autograd.grad(output, weights, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(output, weights), first))


def test_a_forward_without_gradients_keeps_nothing() -> None:
    of = bench("skips")
    stage = copy.deepcopy(of.stage)
    install(stage, programs(of)[-1])
    with torch.no_grad():
        assert not stage(of.task.batch[0]).requires_grad


def test_a_uniform_chain_takes_a_multiple_of_its_operators_in_the_square_root_of_its_memory() -> None:
    """Kirisame et al. 2021: N layers, memory of the order of the square root of N, operators of the order of N."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        tanhs = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Counting.tanhs += func is torch.ops.aten.tanh.default
            return func(*args, **(kwargs or {}))

    for count in (36, 100):
        stage = small(*(nn.Tanh() for _ in range(count)))
        install(stage, tiny(stage, 3 * round(count**0.5) * 4 * 64))
        Counting.tanhs = 0
        given = torch.randn(64, requires_grad=True, generator=torch.Generator().manual_seed(1))
        with Counting():  # type: ignore[no-untyped-call]
            stage(given).sum().backward()
        assert count < Counting.tanhs <= 4 * count
        expected = torch.autograd.grad(small(*(nn.Tanh() for _ in range(count)))(given).sum(), given)[0]
        assert given.grad is not None
        assert torch.equal(given.grad, expected)


def test_compiled_layers_and_moved_activations_are_refused() -> None:
    chosen = ("activation_checkpoint=dtr", "activation_checkpoint.online=true")
    assert refused(*chosen, "compile=true").startswith("compile = true: must be false")
    assert refused(*chosen, "offload=activations_save_on_cpu").startswith("offload.activations = save_on_cpu: must")
