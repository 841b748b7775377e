"""The facts that the plan's rules read: the request, and properties of its model, processes and schedule."""

from __future__ import annotations

from dataclasses import dataclass

from runner.config.schema import RunConfig
from runner.profile import ChangedState, OddWeight
from runner.schedule.traits import ScheduleTraits

__all__ = ["OrderFacts", "RequestFacts", "is_complex"]


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
        odd_weights: its weights that are complex, have no elements or were not made in fp32.
        changed_buffers: names of buffers that a forward changes.
        shared_buffers: names of those of them that several layers use.
        changed_states: what forwards change besides buffers.
    """

    config: RunConfig
    order: ScheduleTraits
    num_layers: int
    statistics: tuple[str, ...] = ()
    odd_weights: tuple[OddWeight, ...] = ()
    changed_buffers: tuple[str, ...] = ()
    shared_buffers: tuple[str, ...] = ()
    changed_states: tuple[ChangedState, ...] = ()

    @property
    def changed_state(self) -> str | None:
        """The first thing that a forward changes and that is no buffer."""
        return next((each.name for each in self.changed_states), None)

    @property
    def written_weight(self) -> str | None:
        """The first weight that a forward changes."""
        return next((each.name for each in self.changed_states if each.weight), None)

    @property
    def written_trained(self) -> str | None:
        """The first trained weight that a forward changes."""
        return next((each.name for each in self.changed_states if each.trained), None)

    @property
    def complex_weight(self) -> str | None:
        """The first trained weight of complex numbers."""
        return next((each.name for each in self.odd_weights if each.trained and is_complex(each)), None)

    @property
    def empty_weight(self) -> str | None:
        """The first weight without elements."""
        return next((each.name for each in self.odd_weights if not each.num_parameters), None)

    @property
    def other_weight(self) -> OddWeight | None:
        """The first trained weight that was made with real numbers of another format than fp32."""
        made_otherwise = (each for each in self.odd_weights if each.dtype != "float32")
        return next((each for each in made_otherwise if each.trained and not is_complex(each)), None)

    @property
    def frozen_weight(self) -> OddWeight | None:
        """The first weight that is not trained and was not made in fp32."""
        return next((each for each in self.odd_weights if not each.trained and each.dtype != "float32"), None)

    @property
    def changed_buffer(self) -> str | None:
        """The first of ``changed_buffers``."""
        return self.changed_buffers[0] if self.changed_buffers else None

    @property
    def shared_buffer(self) -> str | None:
        """The first of ``shared_buffers``."""
        return self.shared_buffers[0] if self.shared_buffers else None


def is_complex(weight: OddWeight) -> bool:
    """Whether a weight has complex numbers."""
    return weight.dtype.startswith("complex")
