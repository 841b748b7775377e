"""The facts that the plan's rules read: the request, and properties of its model, processes and schedule."""

from __future__ import annotations

from dataclasses import dataclass

from runner.config.schema import RunConfig
from runner.schedule.traits import ScheduleTraits

__all__ = ["OrderFacts", "RequestFacts"]


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """A request before its schedule is made.

    Args:
        config: the request.
        layer_names: names of the model's layers; empty if they are not known.
        started: number of ranks that were started already (torchrun, srun); None if the runner starts them.
    """

    config: RunConfig
    layer_names: tuple[str, ...] = ()
    started: int | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks that the request asks for."""
        degrees = self.config.parallelism
        return degrees.pipeline * degrees.data * degrees.tensor


@dataclass(frozen=True, slots=True)
class OrderFacts:
    """A request with the schedule that is planned for it.

    Args:
        config: the request.
        order: properties of the schedule.
        num_layers: number of layers of the model.
        statistics: names of its layers with running statistics.
    """

    config: RunConfig
    order: ScheduleTraits
    num_layers: int
    statistics: tuple[str, ...] = ()
