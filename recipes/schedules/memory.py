"""What a step takes: bytes by formula, by the plan and as the engine holds them; FLOPs and bytes sent, as counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from runner.engine.engine import Engine
from runner.engine.memory_meter import TRACKED_STEPS, MemoryMeter
from runner.model.layers import layers_of
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import predict_memory
from runner.plan.stages.figures import StageFigures, stage_figures
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers
from runner.recipes.benchmarks.pipelines import RunnerPipeline
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.benchmarks.sleeping_stages import mean_square
from runner.recipes.benchmarks.two_stages import require_equal, shared_losses
from runner.recipes.schedules.computed import compute
from runner.recipes.schedules.rows import ROWS, Row
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.lowering.program import lower
from runner.schedule.values import Schedule

__all__ = ["BLOCKS", "RankBytes", "measure", "predict"]

BLOCKS = 16  # of equal size, so that stages are equal for one, two and four chunks on four ranks
_WIDTH, _TOKENS, _SAMPLES = 64, 32, 2  # samples of a micro-batch


@dataclass(frozen=True)
class RankBytes:
    """One rank's bytes at its peak.

    Args:
        weights: parameters.
        activations: what is held besides weights, gradients and the step's batch: saved tensors, messages, transients.
    """

    weights: int
    activations: int


def predict(row: Row, ranks: int, microbatches: int) -> dict[str, Any]:
    """What the plan says of each rank, and the formula and the simulation in bytes.

    ``formula_weights`` is Mw, the D-th part of the model's, for each pipeline; ``share`` is Ma, the bytes of one
    micro-batch on a rank, from F to B: what autograd saves, and the stages' inputs.
    """
    schedule = fuse_backwards(row.build(ranks, microbatches))  # what runs
    profile, figures = _profile(schedule)
    samples = microbatches * _SAMPLES
    parts = predict_memory(lower(schedule), profile, figures, MemoryNeeds(samples, temporaries=1)).parts
    pipelines = len(schedule.rows)
    each = [schedule.parts * _held(one) for one in figures]  # of a whole micro-batch
    shares = [sum(each[stage] for stage in schedule.stages_of(rank)) // pipelines for rank in range(ranks)]
    batches = [_batch_bytes(schedule, rank) for rank in range(ranks)]
    predicted = [
        RankBytes(part.weights, part.total - part.weights - part.gradients - batch)
        for part, batch in zip(parts, batches, strict=True)
    ]
    known = compute(row, ranks, microbatches)
    counts = known.formula_activations
    return {
        "share": shares,
        "formula_weights": pipelines * sum(layer.weight_bytes for layer in profile.layers) // ranks,
        "formula": None if counts is None else _times(counts, shares),
        "simulated": _times(known.simulated_activations, shares),
        "predicted": [asdict(each) for each in predicted],
    }


def measure(ranks: int, microbatches: int, rows: Sequence[Row] = ROWS) -> dict[str, list[dict[str, int]]]:
    """Each rank's :class:`RankBytes`, ``flops`` and bytes ``sent`` of a step by row, from processes that train.

    Counted as sent are messages, and for each sum over twins what a ring sends: 2 (R - 1) / R of the gradients.

    Raises:
        RuntimeError: two schedules do not compute the same losses.
    """
    found: dict[str, list[dict[str, int]]] = run_ranks(ranks, partial(_as_rank, microbatches=microbatches, rows=rows))
    return found


class _Block(nn.Module):
    """A transformer's feed-forward half: [batch, tokens, width] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = value + self.body(value)
        return made


def _model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [_Block() for _ in range(BLOCKS)]


def _batch(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (microbatches * _SAMPLES, _TOKENS, _WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def _profile(schedule: Schedule) -> tuple[ModelProfile, tuple[StageFigures, ...]]:
    """For SGD, which keeps no states."""
    inputs, targets = (part[: _SAMPLES // schedule.parts] for part in _batch(1))
    profile = profile_layers(layers_of(nn.Sequential(*_model()), 0), inputs, targets, mean_square, torch.float32)
    each = BLOCKS // schedule.stages
    partition = [(first, first + each - 1) for first in range(0, BLOCKS, each)]
    return profile, stage_figures(profile, partition)


def _held(figures: StageFigures) -> int:
    return figures.saved_bytes + figures.input_bytes


def _times(counts: Sequence[float], shares: Sequence[int]) -> list[int]:
    return [round(count * share) for count, share in zip(counts, shares, strict=True)]


def _batch_bytes(schedule: Schedule, rank: int) -> int:
    """Of a step's inputs on the first stage's rank, of its targets on the last one's."""
    ends = {0, schedule.stages - 1} & set(schedule.stages_of(rank))
    samples = schedule.microbatches // schedule.parts * _SAMPLES
    return len(ends) * samples * _TOKENS * _WIDTH * 4


def _as_rank(*, microbatches: int, rows: Sequence[Row]) -> dict[str, list[dict[str, int]]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sgd: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01, foreach=False)
    batch = _batch(microbatches)
    losses: dict[str, list[float]] = {}
    found: dict[str, list[dict[str, int]]] = {}
    for row in rows:
        schedule = row.build(ranks, microbatches)
        pipeline = RunnerPipeline(_model(), mean_square, sgd, microbatches, schedule=schedule)
        meter = MemoryMeter(pipeline.engine)
        part = pipeline.part_of(batch)
        for _ in range(TRACKED_STEPS):
            with meter.step(part):
                (finished,) = pipeline.engine.submit(part)
            losses.setdefault(row.label, []).extend(shared_losses(finished.loss))
        before = _sent_bytes(pipeline.engine)
        with FlopCounterMode(display=False) as counter:
            pipeline.engine.submit(part)
        pipeline.engine.drain()
        sent = round(_sent_bytes(pipeline.engine) - before)
        own = sum(p.nbytes for stage in pipeline.engine.stages.values() for p in stage.parameters())
        gradients = sum(gradients.num_bytes for gradients in pipeline.engine.all_gradients)
        held = RankBytes(own, meter.peak_bytes - own - gradients - _batch_bytes(schedule, rank))
        gathered: list[Any] = [None] * ranks
        counted = {"flops": counter.get_total_flops(), "sent": sent}
        dist.all_gather_object(gathered, asdict(held) | counted)
        found[row.label] = gathered
    require_equal(losses)
    return found


def _sent_bytes(engine: Engine) -> float:
    """What this rank has sent: messages to its neighbours, and sums of gradients over twins."""
    return sum(engine.bytes_sent.values()) + sum(gradients.sent.num_bytes for gradients in engine.all_gradients)
