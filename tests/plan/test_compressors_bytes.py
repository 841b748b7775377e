"""What a compressor needs while it works is planned for: as its own exchange allocates it, on shapes of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from compressor_keys import examples_of, section_with
from halved_sums import KIND as HALVES
from plan_profiles import layer, model

from runner.config.schema import CompressionConfig, RunConfig
from runner.engine.transport.base import Gathering, Handle, Transport
from runner.engine.update.gradients import StageGradients
from runner.model.live_tracker import LiveTracker
from runner.optim.catalogue.compression import CompressionKind
from runner.optim.catalogue.registry import COMPRESSORS
from runner.optim.compression.rounds import GradientStep
from runner.plan.make import make_plan
from runner.plan.reductions import Reduction, compressing_bytes, reduction_notes
from runner.profiling.compression import compression_bytes

KINDS = {name: kind for name, kind in COMPRESSORS.items() if kind.compress is not None and name != "custom"}
SHAPES = [(24, 16), (24,), (8, 3, 3, 3), (40, 8), (1,)]
ELEMENTS = sum(map(prod, SHAPES))


def config_of(kind: CompressionKind, *, replicas: int = 3) -> RunConfig:
    config = RunConfig()
    config.parallelism.data, config.compression = replicas, section_with(kind, **examples_of(kind))
    return config


class Echo:
    """A transport in which all replicas send what this one sends."""

    rank = 0

    def all_reduce(self, tensor: torch.Tensor, group: Sequence[int]) -> Handle:
        return cast(Handle, SimpleNamespace(wait=lambda: None))

    def start_all_gather(self, tensor: torch.Tensor, group: Sequence[int]) -> Gathering:
        return cast(Gathering, SimpleNamespace(wait=lambda: [tensor.clone() for _ in group]))


def counted(config: RunConfig, kind: CompressionKind, shapes: Sequence[tuple[int, ...]] = SHAPES) -> int:
    """The most that an exchange of the run allocates beside gradients, residuals and what is kept."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    names = [str(number) for number in range(len(shapes))]
    made = SimpleNamespace(names=names, parameters=parameters, of_step=GradientStep(1))
    gradients = cast(StageGradients, made)
    reducer = kind.reducer(config.compression, gradients)
    peaks: list[int] = []
    for _ in range(2):
        with LiveTracker() as tracker, torch.no_grad():
            for handle in reducer.start(gradients, cast(Transport, Echo()), range(config.parallelism.data)):
                handle.wait()
            reducer.settle(applied=True)
        peaks.append(tracker.peak)
    return max(peaks)


@pytest.mark.parametrize("name", ["topk", "randomk", "signsgd"])
def test_a_stage_of_one_large_tensor_needs_no_more_than_the_figures_of_the_model_say(name: str) -> None:
    """Those that need memory for one tensor at a time need more for each element where a stage has few tensors."""
    config = config_of(KINDS[name])
    found = compression_bytes(config, [(64, 64)] * 8)
    needed = counted(config, KINDS[name], [(64, 64)])
    more = (1 - found["compression_largest_share"]) * found["compression_largest_bytes"]
    planned = 64 * 64 * (found["compression_peak_bytes"] + more)
    assert needed <= planned + 64
    assert planned <= 1.01 * needed + 64


@pytest.mark.parametrize("name", KINDS)
def test_what_a_compressor_needs_is_what_its_exchange_allocates(name: str) -> None:
    config = config_of(KINDS[name])
    found = compression_bytes(config, SHAPES)
    waiting, peak = found["compression_waiting_bytes"], found["compression_peak_bytes"]
    assert counted(config, KINDS[name]) <= peak * ELEMENTS + 64
    assert peak * ELEMENTS <= 1.05 * counted(config, KINDS[name]) + 64
    assert 0 < waiting <= peak


def test_large_tensors_are_tried_with_fewer_rows() -> None:
    config = config_of(KINDS["qsgd"])
    small, large = (
        compression_bytes(config, [shape])["compression_peak_bytes"] for shape in ((1 << 12, 64), (1 << 40, 64))
    )
    assert small == pytest.approx(large, rel=1e-3)


KEEPING = replace(HALVES, state_bytes=lambda section, shape: 4 * prod(shape))
OF_ROUNDS = replace(COMPRESSORS["topk"], examples={})


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("halved_sums:by_function", "what its reducer keeps from step to step and needs while it sums is not counted"),
        ("halved_sums:KIND", "what its reducer keeps from step to step and needs while it sums is not counted"),
        (f"{__name__}:KEEPING", "what its reducer needs while it sums is not counted"),
    ],
)
def test_a_plan_says_what_it_does_not_count_of_a_users_reducer(target: str, said: str) -> None:
    config = RunConfig()
    config.parallelism.data, config.compression = 2, CompressionConfig(name="mine", target=target)
    (line,) = reduction_notes(config)
    assert line.startswith(f"compression=mine: {said}, so that ranks may need more memory than this")
    assert line in make_plan(config, model([layer(gradient_bytes=64), layer()])).advice


def test_a_plan_counts_a_compressor_of_messages_whoever_wrote_it() -> None:
    config = RunConfig()
    for section in (CompressionConfig(), CompressionConfig(name="topk", density=0.5)):
        config.compression = section
        assert [*reduction_notes(config)] == []
    config.compression = CompressionConfig(name="mine", target=f"{__name__}:OF_ROUNDS", density=0.5)
    assert [*reduction_notes(config)] == []


def test_stages_of_a_rank_compress_one_after_the_other() -> None:
    several = [Reduction(0.0, temporary_bytes=100, waiting_bytes=30), Reduction(0.0, temporary_bytes=60)]
    assert compressing_bytes(several) == 30 + 70
    assert compressing_bytes([]) == 0
