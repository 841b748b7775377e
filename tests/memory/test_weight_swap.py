"""Weights in the host's memory: the same bits, the planned bytes and peaks, and nothing left on the device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from layouts import make_engine, part_of
from swapped_runs import STEPS, Ran, largest_gradients, scalars, train_swapped
from torch import Tensor, nn

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.engine.options import EngineOptions
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.memory.apply.weight_swap import WeightSwap
from runner.memory.solve.residency import Run, WeightUnit, rank_turns
from runner.memory.solve.weight_sets import least_set, taken_bytes
from runner.model.data import load_loss
from runner.model.freeze import frozen
from runner.model.layers import StageModule
from runner.model.make import load_layers
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers
from runner.schedule.simulation.weight_link import WeightLink
from runner.strategy.offload import swap_weights

SAMPLES, COUNT = 12, 3
SCALARS = scalars(COUNT)
MODELS: dict[str, tuple[str, ...]] = {
    "mlp": ("model=mlp", "model.kwargs.width=96", "model.kwargs.layers=6"),
    "gpt": (
        "model=gpt", "model.kwargs.width=32", "model.kwargs.vocab_size=61", "model.kwargs.sequence_length=16",
        "model.kwargs.dropout=0.2", "model.kwargs.heads=2",
    ),
    "convolutions": ("model.target=test_weight_swap:convolutions", "data=random_regression", "loss=cross_entropy"),
}  # fmt: skip
GRANULAR = ("offload=weights_granular", "offload.fraction=1.0")
HALF = ("offload=weights_granular", "offload.fraction=0.5")
L2L = ("offload=weights_l2l", "schedule=looped_bfs", "activation_checkpoint=full")


def convolutions() -> nn.Module:
    """Batch norm, layers without weights, and layers that work in place."""
    torch.manual_seed(4)
    block = partial(nn.Conv2d, kernel_size=3, padding=1)
    return nn.Sequential(
        nn.Sequential(block(3, 8), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.Sequential(block(8, 16), nn.BatchNorm2d(16), nn.Dropout(0.3), nn.Tanh()),
        nn.ReLU(),
        nn.Sequential(block(16, 8), nn.BatchNorm2d(8, momentum=None)),
        nn.Sequential(nn.Flatten(), nn.Linear(512, 5)),
    )


def drawn(model: str, samples: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(5)
    if model == "mlp":
        return torch.randn(samples, 32, generator=chance), torch.randn(samples, 8, generator=chance)
    if model == "convolutions":
        return torch.randn(samples, 3, 8, 8, generator=chance), torch.randint(0, 5, (samples,), generator=chance)
    tokens = partial(torch.randint, 0, 61, (samples, 16), generator=chance)
    return tokens(), tokens()


def requested(model: str, *overrides: str) -> RunConfig:
    common = ("device=cpu", f"data.batch_size={SAMPLES}", f"schedule.microbatches={COUNT}", "logger=none")
    return resolve([*MODELS[model], *common, *overrides])


@cache
def _profiled(model: str, given: tuple[str, ...]) -> ModelProfile:
    config = requested(model, *given)
    inputs, targets = drawn(model, SAMPLES // COUNT)
    sources = frozen(load_layers(config.model, 0), config.trainer.freeze)
    profile = profile_layers(sources, inputs, targets, load_loss(config.loss), torch.float32)
    rows = [
        replace(row, forward_seconds=1e-9 * row.forward_flops, backward_seconds=1e-9 * row.backward_flops)
        for row in (*profile.layers, profile.loss)
    ]
    return replace(profile, layers=tuple(rows[:-1]), loss=rows[-1], optimizer_bytes_per_gradient_byte=2.0)


def planned(model: str, *overrides: str) -> RunPlan:
    given = tuple(each for each in overrides if each.startswith(("model.", "trainer.freeze", "data.", "optimizer=")))
    return make_plan(requested(model, *overrides), _profiled(model, given))


def run(model: str, *overrides: str, samples: int = SAMPLES) -> Ran:
    config, plan = requested(model, *overrides), planned(model, *overrides)
    torch.manual_seed(0)
    return train_swapped(
        plan,
        lambda: frozen(load_layers(config.model, 0), config.trainer.freeze),
        load_loss(config.loss),
        drawn(model, samples),
        count=config.schedule.microbatches,
        delay_seconds=config.offload.delay_seconds,
    )


@pytest.mark.parametrize(
    ("model", "offload", "order"),
    [
        ("mlp", GRANULAR, ("parallelism.pipeline=2", "schedule=interleaved_1f1b", "schedule.microbatches=4")),
        ("convolutions", HALF, ("activation_checkpoint=full",)),
    ],
)
def test_bits_bytes_and_peaks_are_those_of_the_plan(
    model: str, offload: tuple[str, ...], order: tuple[str, ...]
) -> None:
    kept, moved = run(model, *order), run(model, *offload, *order)
    moved.assert_same(kept)
    assert kept.moved == [(0, 0)] * len(kept.moved)
    assert moved.moved == moved.planned
    assert sum(sum(each) for each in moved.moved) > 0
    assert all(held <= most for held, most in zip(moved.pooled, largest_gradients(moved.plan), strict=True))
    for measured, predicted in zip(moved.peak, moved.plan.peak_memory_bytes, strict=True):
        assert measured <= predicted + SCALARS


def test_bits_are_the_same_where_the_last_microbatches_have_no_samples() -> None:
    """As in the last batch of an epoch: what the last one that is computed has used goes home."""
    order = ("schedule=looped_bfs", "schedule.chunks=4")
    run("mlp", *GRANULAR, *order, samples=2).assert_same(run("mlp", *order, samples=2))


def test_the_peak_is_the_predicted_one_to_a_percent() -> None:
    wide = ("model.kwargs.width=128", "model.kwargs.layers=8")
    moved, kept = run("mlp", *wide, *HALF), planned("mlp", *wide)
    for most, predicted, before in zip(moved.peak, moved.plan.peak_memory_bytes, kept.peak_memory_bytes, strict=True):
        assert 0.99 * predicted <= most <= predicted + SCALARS
        assert most < 0.8 * before


@pytest.mark.costly
def test_a_layer_has_no_gradients_on_the_device_before_its_backward_makes_the_first() -> None:
    """A block of a transformer has its largest temporaries before that, and a table of tokens makes nothing else."""
    moved = run("gpt", "model.kwargs.width=64", "model.kwargs.vocab_size=512", *GRANULAR)
    for most, predicted in zip(moved.peak, moved.plan.peak_memory_bytes, strict=True):
        assert 0.995 * predicted <= most <= predicted + SCALARS


def test_layer_to_layer_moves_each_weight_twice_whatever_the_number_of_microbatches() -> None:
    moved = run("mlp", *L2L, "schedule.chunks=6", "schedule.microbatches=4")
    sizes = [4 * layer.num_parameters for layer in moved.plan.profile.layers]
    each = 2 * sum(sizes) - sum(sizes[-2:]), sum(sizes)  # those at the turn need not move
    assert moved.plan.host_weight_bytes == each
    assert moved.moved == [(STEPS * each[0], STEPS * each[1])]


def test_layer_to_layer_has_the_bits_of_one_process_and_needs_two_layers_at_any_depth() -> None:
    width, peaks = 128, []
    for depth in (4, 8):
        sizes = (f"model.kwargs.width={width}", f"model.kwargs.layers={depth}")
        moved = run("mlp", *sizes, *L2L, f"schedule.chunks={depth}")
        moved.assert_same(run("mlp", *sizes))
        stash = 4 * SAMPLES * width * (depth - 1)  # the inputs of all layers but the first, of all micro-batches
        peaks.append(moved.peak[0] - stash)
        assert moved.peak[0] <= moved.plan.peak_memory_bytes[0] + SCALARS
    layer = 4 * (width * width + width)
    two = 2 * 2 * layer  # weights and gradients
    assert all(abs(peak - two) <= 0.05 * two for peak in peaks), (peaks, two)


def test_frozen_blocks_come_to_the_device_and_nothing_goes_back() -> None:
    pipeline = 2
    frozen_blocks = ("trainer.freeze=['[1-4].*']", f"parallelism.pipeline={pipeline}")
    swapped = ("offload=weights_blockswap", "offload.blocks=2", "offload.frozen_only=true")
    kept, moved = run("mlp", *frozen_blocks), run("mlp", *frozen_blocks, *swapped)
    moved.assert_same(kept)
    assert moved.moved == moved.planned
    assert all(weights > 0 and gradients == 0 for weights, gradients in moved.moved)
    home = sum(unit.weight_bytes for units in moved.plan.weights.stages for unit in units)
    assert home == 2 * pipeline * 4 * (96 * 96 + 96)
    assert all(
        measured <= predicted + SCALARS
        for measured, predicted in zip(moved.peak, moved.plan.peak_memory_bytes, strict=True)
    )


def test_as_few_layers_move_as_the_limit_asks_for() -> None:
    wide = ("model.kwargs.width=96", "model.kwargs.layers=10")
    whole = planned("mlp", *wide)
    numbers = []
    for share in (1.01, 0.9, 0.6):
        limit = int(share * whole.peak_memory_bytes[0])
        plan = planned("mlp", *wide, "offload=weights_granular", f"memory_limit={limit}")
        assert plan.fits
        numbers.append(sum(len(units) for units in plan.weights.stages))
    assert numbers == sorted(numbers)
    assert numbers[0] == 0 < numbers[1] < numbers[2] < 10


@pytest.mark.parametrize("seed", range(5))
def test_the_least_set_is_that_of_all_sets(seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, 1, 9, generator=chance)
    count = int(torch.randint(1, 11, (), generator=chance))
    drawn_units = zip(*(draw((count,)).tolist() for _ in range(3)), strict=True)
    units = [WeightUnit(at, at, *each) for at, each in enumerate(drawn_units)]
    for excess in range(0, sum(unit.home_bytes for unit in units) + 3, 4):
        sets = (each for size in range(count + 1) for each in itertools.combinations(units, size))
        right = [each for each in sets if sum(unit.home_bytes for unit in each) - taken_bytes(each) >= excess]
        found = least_set(units, excess)
        if not right:
            assert found == units
            continue
        assert sum(each.home_bytes for each in found) - taken_bytes(found) >= excess
        least = min(sum(unit.device_bytes for unit in each) for each in right)
        assert sum(unit.device_bytes for unit in found) == least


def test_the_device_holds_the_unit_in_use_and_the_next() -> None:
    units = [WeightUnit(at, at, 10, 3) for at in (0, 1, 3)]
    forward, backward = (0, 1, 2, 3), (3, 2, 1, 0)
    turns = rank_turns([Run(False, 0, 0, forward), Run(True, 0, 0, backward)], units)
    listed = [(turn.layers[0], turn.held, turn.device_bytes) for each in turns.actions for turn in each.turns]
    assert listed == [
        (0, (0, 1), 20), (1, (1, 2), 20), (2, (1, 2), 20), (3, (1, 2), 20),
        (3, (1, 2), 23), (2, (1, 2), 23), (1, (0, 1), 26), (0, (0,), 16),
    ]  # fmt: skip
    assert turns.traffic == (40, 9)


def test_a_failed_window_leaves_all_weights_at_home() -> None:
    """A layer raises in the middle of a step; what was on the device goes home, and its gradients are dropped."""
    plan = planned("mlp", *GRANULAR)
    sources = load_layers(requested("mlp").model, 0)

    def one(transport: ThreadTransport) -> tuple[bool, bool]:
        found: list[WeightSwap] = []

        def swapped(stages: Mapping[int, StageModule]) -> WeightSwap | None:
            options = EngineOptions(microbatches=COUNT)
            made = swap_weights(plan, stages, (), options, torch.device("cpu"), nullcontext)
            assert made is not None
            found.append(made)
            return made

        engine = make_engine(
            sources, nn.functional.mse_loss, transport, schedule=plan.schedule, pipeline=1, data=1, count=COUNT,
            optimizer=partial(torch.optim.SGD, lr=0.1), swap=swapped,
        )  # fmt: skip
        engine.stages[0].layers[3].register_forward_hook(_fail)
        with pytest.raises(Exception, match="on purpose"):
            engine.submit(part_of(drawn("mlp", SAMPLES), transport, 1, 1))
        with pytest.raises(RuntimeError, match="left on the device"):
            found[0].require_empty()
        given_up = engine.give_up()
        found[0].require_empty()
        return given_up, all(bool(parameter.grad is not None) for parameter in found[0].parameters)

    assert run_ranks(1, one) == [(True, True)]


def _fail(*given: object) -> None:
    raise ValueError("on purpose")


def test_a_link_that_is_free_makes_nobody_wait() -> None:
    assert WeightLink({}).run((False, 0, 0), 0.0, 1.0, 2.0) == 3.0
    assert max(planned("mlp", *GRANULAR).host_seconds) == 0.0
