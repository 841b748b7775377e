"""What sums of gradients over replicas send and keep: for each stage, and of the whole step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from runner.config.precision import weight_widths
from runner.config.schema import RunConfig
from runner.optim.catalogue.compression import CompressionKind, Wire
from runner.optim.catalogue.registry import compression_of, optimizer_of
from runner.plan.stages.figures import StageFigures
from runner.plan.values import Link
from runner.profile import ModelProfile, SharedWeight
from runner.schedule.simulation.clock import StageCosts
from runner.schedule.values import Schedule

__all__ = ["Reduction", "compressing_bytes", "reduction_notes", "reductions", "sent_bytes", "with_compression"]

_TEMPORARIES = 4
"""Copies of a stage's gradients in fp32 while they are compressed, if a profile does not say it: values, message, sum,
what is left over."""
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Reduction:
    """The sum of one stage's gradients by the request's compressor.

    Args:
        sent_bytes: bytes that each holder sends in a mean step; None: the compressor does not say it.
        kept_bytes: bytes that each holder keeps from step to step.
        temporary_bytes: bytes that it needs while it compresses.
        waiting_bytes: the part of them that is also there while other stages of the rank compress.
        seconds: that each holder computes in a step to compress; 0 if that was not measured.
    """

    sent_bytes: float | None
    kept_bytes: int = 0
    temporary_bytes: int = 0
    waiting_bytes: int = 0
    seconds: float = 0.0


def reductions(
    config: RunConfig, profile: ModelProfile, figures: Sequence[StageFigures], schedule: Schedule
) -> list[Reduction]:
    """The sum of each stage's own gradients; weights of several stages are not among them."""
    kind = compression_of(config.compression)
    return [_reduction(config, kind, profile, stage, _copies(config, schedule, at)) for at, stage in enumerate(figures)]


def reduction_notes(config: RunConfig) -> Iterator[str]:
    """Yield a note about what is not counted of a reducer that a user's own function or kind makes."""
    kind = compression_of(config.compression)
    if config.compression.target is None or kind.compress is not None:
        return
    keeps = "" if kind.state_bytes is not None else "keeps from step to step and "
    remedy = "compress" if kind.state_bytes is not None else "compress, or with state_bytes for what it keeps"
    yield (
        f"compression={config.compression.name}: what its reducer {keeps}needs while it sums is not counted, so that "
        f"ranks may need more memory than this: a CompressionKind with {remedy} is counted"
    )


def sent_bytes(
    config: RunConfig, profile: ModelProfile, figures: Sequence[StageFigures], schedule: Schedule
) -> float | None:
    """The bytes of gradients that all ranks send in a mean step.

    None if that is not predicted: with ZeRO, with an optimizer that compresses its momentum, for a compressor that does
    not say it, and where replicas or pipelines exchange weights instead.
    """
    if config.zero.stage is not None or optimizer_of(config.optimizer).compresses:
        return None
    if schedule.wave or schedule.own_weights:
        return None
    total = 0.0
    for at, each in enumerate(reductions(config, profile, figures, schedule)):
        if each.sent_bytes is None:
            return None
        total += _copies(config, schedule, at) * each.sent_bytes
    for weight in profile.shared:
        stages = _stages_of(weight, figures)
        positions = {schedule.rows[row][stage] for stage in stages for row in schedule.copies_of(stage)}
        holders = config.parallelism.data * len(positions)
        if len(stages) > 1:
            total += 2 * (holders - 1) * weight.gradient_bytes
    return config.parallelism.tensor * total


def with_compression(costs: StageCosts, planned: Sequence[Reduction], replicas: int, link: Link) -> StageCosts:
    """``costs`` with what compressors compute and send, as far as they say it, in as many messages as a ring has."""
    messages = 2 * (replicas - 1)

    def seconds(sent: float) -> float:
        return messages * link.seconds(sent / messages) if messages else 0.0

    sums = [
        (own if each.sent_bytes is None else seconds(each.sent_bytes)) + each.seconds
        for own, each in zip(costs.reduce, planned, strict=True)
    ]
    return replace(costs, reduce=sums)


def _reduction(
    config: RunConfig, kind: CompressionKind, profile: ModelProfile, stage: StageFigures, copies: int
) -> Reduction:
    if copies == 1:
        return Reduction(0.0)
    width = weight_widths(config)[0]
    shapes = _own_shapes(profile, stage, width)
    sent = None
    if kind.bytes_sent is not None or config.compression.name == "none":
        sent = kind.bytes_in_a_step(Wire(config.compression, shapes, width, copies))
    kept = sum(kind.kept_bytes(config.compression, shape) for shape in shapes)
    sizes = [math.prod(shape) for shape in shapes] if kind.compress is not None else []
    elements = sum(sizes)
    temporary = elements * (profile.compression_peak_bytes or _TEMPORARIES * _FP32)
    larger = max(0.0, max(sizes, default=0) - elements * profile.compression_largest_share)
    temporary += larger * profile.compression_largest_bytes
    waiting = elements * profile.compression_waiting_bytes
    seconds = stage.gradient_bytes * profile.compression_seconds_per_byte
    return Reduction(sent, kept, math.ceil(temporary), math.ceil(waiting), seconds)


def compressing_bytes(planned: Sequence[Reduction]) -> int:
    """What a rank needs while the gradients of its stages are compressed, one stage after the other."""
    waiting = sum(each.waiting_bytes for each in planned)
    return waiting + max((each.temporary_bytes - each.waiting_bytes for each in planned), default=0)


def _own_shapes(profile: ModelProfile, stage: StageFigures, width: int) -> list[tuple[int, ...]]:
    """The shapes of the trained tensors of a stage that no other stage uses; a tensor of several layers counts once.

    Where the profile does not have the shapes, each layer counts as one vector.
    """
    last = len(profile.layers) - 1
    layers = [*profile.layers[stage.first : stage.last + 1], *([profile.loss] if stage.last == last else [])]
    shapes: list[tuple[int, ...]] = []
    for layer in layers:
        shapes += layer.trained_shapes or ([(layer.gradient_bytes // width,)] if layer.gradient_bytes else [])
    for weight in profile.shared:
        inside = sum(stage.first <= layer <= stage.last for layer in weight.layers)
        spare = inside - 1 if inside == len(weight.layers) else inside
        for _ in range(spare if weight.gradient_bytes and weight.shape in shapes else 0):
            shapes.remove(weight.shape)
    return shapes


def _stages_of(weight: SharedWeight, figures: Sequence[StageFigures]) -> list[int]:
    if not weight.gradient_bytes:
        return []
    return [at for at, each in enumerate(figures) if any(each.first <= one <= each.last for one in weight.layers)]


def _copies(config: RunConfig, schedule: Schedule, stage: int) -> int:
    """The number of ranks that hold a stage."""
    return config.parallelism.data * len(schedule.copies_of(stage))
