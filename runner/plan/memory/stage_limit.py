"""Bounds the memory of single stages for the search for a partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from runner.plan.memory.extra import older_versions
from runner.plan.memory.held import Held, held_microbatches
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import batch_bytes, shared_states, temporary_bytes, wide_gradients
from runner.plan.memory.weight_places import WeightPlaces
from runner.plan.memory.zero import ZeroSharing
from runner.plan.stages.figures import LayerRanges, StageFigures
from runner.profile import ModelProfile
from runner.schedule.values import Schedule

__all__ = ["StageMemoryLimit", "bytes_of_one", "running_bytes"]


@dataclass(frozen=True)
class StageMemoryLimit:
    """Says which layers fit into a stage, as if its rank had no other stage.

    It is a bound for the search for a partition. :class:`runner.plan.memory.rank_limit.RankMemory` knows all stages of
    a rank, and the final decision comes from the walk of the whole rank.

    Args:
        profile: the profile for the largest micro-batch.
        in_flight: for each stage, the largest numbers of micro-batches held at once.
        limit_bytes: for each stage, the limit of its rank, without the batch that the rank holds.
        held_bytes: for each stage, the batch that its rank holds.
        needs: what else is held and needed.
    """

    profile: ModelProfile
    in_flight: tuple[tuple[Held, ...], ...]
    limit_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    needs: MemoryNeeds

    @cached_property
    def figures(self) -> Callable[[int, int], StageFigures]:
        """The figures of a stage with given layers, first .. last; the search asks for one range at many stages."""
        return cache(LayerRanges(self.profile).figures)

    @classmethod
    def of(
        cls, profile: ModelProfile, schedule: Schedule, rank_limits: Sequence[int], needs: MemoryNeeds
    ) -> StageMemoryLimit:
        """The limit of each stage of a schedule, each of whose ranks has a limit."""
        batches, limits = [0] * schedule.stages, [max(rank_limits)] * schedule.stages
        for rank in range(schedule.ranks):
            held = batch_bytes(profile, schedule, rank, needs.batch_samples)
            for stage in schedule.stages_of(rank):
                batches[stage] = max(batches[stage], held)
                limits[stage] = min(limits[stage], rank_limits[rank])
        left = tuple(limit - held for limit, held in zip(limits, batches, strict=True))
        needs = replace(needs, extra=needs.extra or older_versions(schedule))
        return cls(profile, held_microbatches(schedule), left, tuple(batches), needs)

    def fits(self, first: int, last: int, stage: int) -> bool:
        """Whether the stage's states and its micro-batches in flight are within the limit."""
        return self._own_peak(first, last, stage) <= self.limit_bytes[stage]

    def hopeless(self, first: int, last: int, stage: int) -> bool:
        """Whether these layers exceed the limit, even as a part of a larger stage."""
        return self._own_floor(first, last, stage) > self.limit_bytes[stage]

    def peak_bytes(self, first: int, last: int, stage: int) -> int:
        """The stage's peak with these layers, including the batch that its rank holds."""
        return self.held_bytes[stage] + self._own_peak(first, last, stage)

    def floor_bytes(self, first: int, last: int, stage: int) -> int:
        """A lower bound of :meth:`peak_bytes` of these layers, alone or together with more layers before ``first``."""
        return self.held_bytes[stage] + self._own_floor(first, last, stage)

    @cached_property
    def _own_peak(self) -> Callable[[int, int, int], int]:
        """The peak of given layers, first .. last, in a stage; a search asks for the same ones several times."""
        return cache(self._peak_of)

    @cached_property
    def _own_floor(self) -> Callable[[int, int, int], int]:
        """As :attr:`_own_peak`, a lower bound of it that also holds if layers before ``first`` are added."""
        return cache(self._floor_of)

    def _peak_of(self, first: int, last: int, stage: int) -> int:
        figures = self.figures(first, last)
        held = max(_held_bytes(figures, held) for held in self.in_flight[stage])
        return self.state_bytes(figures, stage) + max(held + running_bytes(figures), self.step_bytes(figures))

    def _floor_of(self, first: int, last: int, stage: int) -> int:
        figures = self.figures(first, last)
        least = max(held.saved * figures.saved_bytes for held in self.in_flight[stage])
        return self._state_bytes(figures, stage, self._least_sharing) + least

    def step_bytes(self, figures: StageFigures) -> int:
        """The bytes of temporary tensors at the stage's optimizer step."""
        if self.needs.sharing is not None:
            return shared_states(self.needs.sharing, figures, 0, accelerated=self.needs.accelerated).step_bytes
        update = temporary_bytes(figures, self.profile, self.needs)
        update += wide_gradients([figures], self.profile)
        return max(update, min(self.needs.flattened, figures.gradient_bytes))

    def state_bytes(self, figures: StageFigures, stage: int) -> int:
        """The bytes that the stage holds all the time."""
        return self._state_bytes(figures, stage, self.needs.sharing)

    @cached_property
    def _least_sharing(self) -> ZeroSharing | None:
        """Without the weights that partitions cut: with more layers, the cuts lie elsewhere."""
        return None if self.needs.sharing is None else replace(self.needs.sharing, places=WeightPlaces())

    def _state_bytes(self, figures: StageFigures, stage: int, sharing: ZeroSharing | None) -> int:
        if sharing is not None:
            return shared_states(sharing, figures, 0, accelerated=self.needs.accelerated).states.total
        extra = self.needs.extra[stage].held_bytes(figures) if self.needs.extra else 0
        whole = round(self.needs.averages * figures.gradient_bytes)
        states = whole + (figures.optimizer_bytes - whole) // (self.needs.states_over or 1)
        return extra + figures.weight_bytes + figures.gradient_bytes + states


def _held_bytes(figures: StageFigures, held: Held) -> int:
    """The bytes of so many micro-batches of a stage."""
    return sum(number * size for number, size in zip(held, bytes_of_one(figures), strict=True))


def bytes_of_one(figures: StageFigures) -> Held:
    """What one micro-batch of a stage holds in each of the ways of :class:`~runner.plan.memory.held.Held`, in bytes."""
    return Held(
        saved=figures.saved_bytes + figures.input_bytes,
        deferred=figures.deferred_bytes + figures.deferred_input_bytes,
        dropped=figures.output_bytes + figures.input_bytes,
    )


def running_bytes(figures: StageFigures) -> int:
    """The bytes of a stage's forward or backward while it runs, beyond those of its micro-batch among the held ones."""
    forward = figures.forward_peak_bytes - figures.saved_bytes
    return figures.input_bytes + max(forward, figures.output_gradient_bytes + figures.backward_peak_bytes)
