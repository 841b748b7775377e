"""What the plan's rules read: the request with what is known of its model, its processes and its schedule."""

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
        layer_names: of the model; empty where they are not known.
        started: ranks that were started already (torchrun, srun); None where the runner starts them.
    """

    config: RunConfig
    layer_names: tuple[str, ...] = ()
    started: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks that the request asks for."""
        degrees = self.config.parallelism
        return degrees.pipeline * degrees.data * degrees.tensor


@dataclass(frozen=True, slots=True)
class OrderFacts:
    """A request with the schedule that is planned for it.

    Args:
        config: the request.
        order: traits of the schedule.
        num_layers: layers of the model.
        statistics: names of its layers with running statistics.
    """

    config: RunConfig
    order: ScheduleTraits
    num_layers: int
    statistics: tuple[str, ...] = ()
