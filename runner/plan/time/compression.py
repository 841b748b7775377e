"""Seconds of reductions whose gradients are compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.config.schema import RunConfig
from runner.optim.catalogue.compression import CompressionKind
from runner.optim.catalogue.registry import compression_of
from runner.plan.memory.zero import weight_widths
from runner.plan.stages.figures import StageFigures
from runner.plan.values import Link
from runner.schedule.simulation.clock import StageCosts

__all__ = ["with_compression"]


def with_compression(config: RunConfig, costs: StageCosts, figures: Sequence[StageFigures], link: Link) -> StageCosts:
    """``costs`` with the bytes that the request's compressor sends, in as many messages as an all-reduce's ring has.

    As they are without compression, and where the compressor does not say how much it sends.
    """
    kind = compression_of(config.compression)
    if kind.bytes_sent is None:
        return costs
    return replace(costs, reduce=[_seconds(config, kind, stage, link) for stage in figures])


def _seconds(config: RunConfig, kind: CompressionKind, stage: StageFigures, link: Link) -> float:
    replicas, width = config.parallelism.data, weight_widths(config)[0]
    messages = 2 * (replicas - 1)
    sent = kind.bytes_in_a_step(stage.gradient_bytes // width, width, replicas)
    return messages * link.seconds(sent / messages) if messages else 0.0
