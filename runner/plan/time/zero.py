"""The seconds of ZeRO's collectives, updates and traffic with the host in a step, on a machine that is described.

Collectives are counted in passes of a ring over the replicas; a reduce-scatter or an all-gather is one pass. Stage 0
makes two passes over the gradients. Stages 1 and 2 make two over the gradients, whose buckets DeepSpeed 0.19.8 sums on
all ranks, and one over the weights. Stage 3 makes one over the gradients and, in each forward and backward, one over
the weights, with a message per layer and neighbour. None of it is taken to overlap with the compute, so that the result
is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.config.precision import weight_widths
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import optimizer_of
from runner.plan.stages.figures import StageFigures
from runner.plan.values import Link
from runner.profile import ModelProfile
from runner.schedule.simulation.clock import StageCosts

__all__ = ["host_update_seconds_per_byte", "with_sharing"]

# Of what it updates, an Adam reads weight, gradient and two moments, and writes weight and moments.
_PASSES_OVER_MEMORY = 7


def with_sharing(
    config: RunConfig, costs: StageCosts, profile: ModelProfile, figures: Sequence[StageFigures], link: Link
) -> StageCosts:
    """``costs`` with the reductions and steps of the request's stage of ZeRO; unchanged where it asks for none."""
    if config.zero.stage is None or profile.seconds_source != "estimated":
        return costs
    seconds = _Seconds(config, profile, link)
    return replace(
        costs,
        reduce=[seconds.reduce(stage) for stage in figures],
        step=[seconds.step(stage) for stage in figures],
    )


def host_update_seconds_per_byte(config: RunConfig, profile: ModelProfile) -> tuple[float, float]:
    """Seconds of copying for a byte of gradients and of the weights it updates, and of updating in the host's memory.

    Args:
        config: the request.
        profile: its model.
    """
    gradients = max(sum(layer.gradient_bytes for layer in profile.layers), 1)
    copying, updating = _Seconds(config, profile, Link()).host_seconds(gradients)
    return copying / gradients, updating / gradients


class _Seconds:
    def __init__(self, config: RunConfig, profile: ModelProfile, link: Link) -> None:
        self._config, self._profile = config, profile
        self._hardware = config.hardware
        self._replicas = config.parallelism.data
        self._stage = config.zero.stage or 0
        self._link = link
        self._width, self._master = weight_widths(config)

    def reduce(self, stage: StageFigures) -> float:
        passes = 1 if self._stage == 3 else 2
        gathers = 2 * self._config.schedule.microbatches if self._stage == 3 else 0
        layers = stage.last - stage.first + 1
        return passes * self._ring(stage.gradient_bytes) + gathers * self._ring(stage.gradient_bytes, layers)

    def step(self, stage: StageFigures) -> float:
        gather = self._ring(stage.gradient_bytes) if self._stage in (1, 2) else 0.0
        shares = self._replicas if self._stage else 1
        part = stage.gradient_bytes / shares
        if self._config.offload.optimizer != "none":
            return gather + self._in_the_host(part)
        return gather + self._on_the_device(part)

    def _on_the_device(self, part: float) -> float:
        speed = self._hardware.memory_bytes_per_second
        if speed is None:
            return part * self._profile.optimizer_seconds_per_byte
        return self._moved(part) / speed

    def _in_the_host(self, part: float) -> float:
        degrees = self._config.parallelism
        between = degrees.pipeline * degrees.tensor if degrees.order == "pipeline_inside" else 1
        here = max(1, (self._hardware.devices_per_node or self._replicas * between) // between)
        neighbours = min(degrees.data, here)
        copying, updating = self.host_seconds(part)
        return copying + neighbours * updating

    def host_seconds(self, part: float) -> tuple[float, float]:
        """Gradients go out, weights come back, and the update is bound by the host's memory, if it is alone there."""
        link, memory = self._hardware.host_link_bytes_per_second, self._hardware.host_memory_bytes_per_second
        return 2 * part / link if link else 0.0, self._moved(part) / memory if memory else 0.0

    def _moved(self, part: float) -> float:
        """The bytes that an update of ``part`` bytes of gradients reads and writes."""
        kind = optimizer_of(self._config.optimizer)
        elements = part / self._width
        if kind.state_bytes is None:
            return _PASSES_OVER_MEMORY * self._master * elements
        return elements * 3 * self._master + 2 * kind.state_bytes(
            round(elements)
        )  # weight twice, gradient; states twice

    def _ring(self, num_bytes: int, messages: int = 1) -> float:
        """The seconds of one pass of ``num_bytes``, in so many messages to each neighbour."""
        hops = self._replicas - 1
        return hops * messages * self._link.seconds(num_bytes / self._replicas / messages)
