"""Peak memory of each rank, by walking what it will do.

The walk mirrors what the engine holds: a boundary input from the moment its receive is posted to the end of
its micro-batch's backward, what autograd saved from forward to backward, the gradient of a boundary from when
its receive is posted to the end of the backward that uses it, the gradient of an input until its message has
left (the next one to leave finds it gone). Gradients are one persistent flat buffer, reduced in place. Ranks
with a first or last stage hold the batch of a whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from runner.plan.stages import LayerRanges, StageFigures
from runner.plan.values import MemoryParts, MemoryPrediction
from runner.plan.zero_memory import ZeroSharing
from runner.profile import ModelProfile
from runner.schedule.values import Action, Op, Payload, Program, Schedule

__all__ = [
    "StageMemoryLimit",
    "in_flight_microbatches",
    "optimizer_temporaries",
    "predict_memory",
]

# Largest-parameter-sized temporaries of an optimizer step that goes parameter by parameter.
_TEMPORARIES = {"sgd": 1}
_ADAM_TEMPORARIES = 2


def optimizer_temporaries(optimizer: str) -> int:
    """How many tensors of the size of the largest parameter one step of this optimizer makes and drops."""
    return _TEMPORARIES.get(optimizer, _ADAM_TEMPORARIES)


def predict_memory(
    program: Program,
    profile: ModelProfile,
    figures: Sequence[StageFigures],
    *,
    batch_samples: int,
    temporaries: int = _ADAM_TEMPORARIES,
    sharing: ZeroSharing | None = None,
    accelerated: bool = True,
) -> MemoryPrediction:
    """Each pipeline rank's memory at its peak.

    Args:
        program: one replica's lowered schedule.
        profile: of the step's largest micro-batch.
        figures: of each stage, from the same profile.
        batch_samples: samples of one optimizer step on one replica.
        temporaries: see :func:`optimizer_temporaries`.
        sharing: how replicas share out weights, gradients and states; None: each holds all.
        accelerated: the host's memory is another one than the device's.
    """
    schedule = program.schedule
    batch = -(-(profile.input_bytes + profile.target_bytes) * batch_samples // profile.samples)
    parts, host = [], []
    for rank, actions in enumerate(program.actions):
        stages = schedule.stages_of(rank)
        held = [figures[stage] for stage in stages]
        data = batch if 0 in stages or schedule.stages - 1 in stages else 0
        if sharing is None:
            states = _states(held, profile, data)
            step_bytes = max((_temporary_bytes(one, profile, temporaries) for one in held), default=0)
            step_bytes += _wide_gradients(held, profile)
        else:
            states, step_bytes = _shared_states(sharing, held[0], data, accelerated=accelerated)
        parts.append(_RankWalk(schedule, rank, figures, states, step_bytes).peak(actions))
        host.append(sharing.held(held[0]).host if sharing is not None and accelerated else 0)
    return MemoryPrediction(tuple(parts), tuple(host))


def in_flight_microbatches(schedule: Schedule) -> tuple[int, ...]:
    """Per stage: most micro-batches between the start of their forward and the end of their backward."""
    most = [0] * schedule.stages
    for actions in schedule.actions:
        held = [0] * schedule.stages
        for action in actions:
            if action.op is Op.F:
                held[action.stage] += 1
                most[action.stage] = max(most[action.stage], held[action.stage])
            elif action.op in (Op.B, Op.W):
                held[action.stage] -= 1
    return tuple(most)


@dataclass(frozen=True)
class StageMemoryLimit:
    """Which layers fit a stage, by its own part of its rank's limit and its in-flight micro-batches.

    A bound for the partition's search: the rank's walk decides in the end.

    Args:
        profile: of the largest micro-batch.
        in_flight: per stage.
        limit_bytes: per stage: its rank's limit / the rank's stages, without what the rank holds anyway.
        temporaries: see :func:`optimizer_temporaries`.
        sharing, accelerated: see :func:`predict_memory`.
    """

    profile: ModelProfile
    in_flight: tuple[int, ...]
    limit_bytes: tuple[int, ...]
    temporaries: int = _ADAM_TEMPORARIES
    sharing: ZeroSharing | None = None
    accelerated: bool = True

    @cached_property
    def _figures(self) -> Callable[[int, int], StageFigures]:
        return cache(LayerRanges(self.profile).figures)  # the search asks for one range at many stages

    @classmethod
    def of(
        cls,
        profile: ModelProfile,
        schedule: Schedule,
        rank_limit_bytes: int,
        *,
        batch_samples: int,
        temporaries: int,
        sharing: ZeroSharing | None = None,
        accelerated: bool = True,
    ) -> StageMemoryLimit:
        """The limit of each stage of a schedule whose ranks may use ``rank_limit_bytes``."""
        batch = -(-(profile.input_bytes + profile.target_bytes) * batch_samples // profile.samples)
        limits = [rank_limit_bytes] * schedule.stages
        for rank in range(schedule.ranks):
            stages = schedule.stages_of(rank)
            held = batch if 0 in stages or schedule.stages - 1 in stages else 0
            for stage in stages:
                limits[stage] = min(limits[stage], (rank_limit_bytes - held) // len(stages))
        in_flight = in_flight_microbatches(schedule)
        return cls(profile, in_flight, tuple(limits), temporaries, sharing, accelerated)

    def fits(self, first: int, last: int, stage: int) -> bool:
        """Whether the stage's states and its in-flight micro-batches are within its part of the limit."""
        figures = self._figures(first, last)
        states = self._states(figures)
        per_microbatch = figures.saved_bytes + figures.input_bytes
        others = (self.in_flight[stage] - 1) * per_microbatch + 2 * figures.input_bytes
        forward = others + figures.forward_peak_bytes
        backward = others + figures.saved_bytes + figures.output_bytes + figures.backward_peak_bytes
        step = self._step(figures)
        return states + max(forward, backward, step) <= self.limit_bytes[stage]

    def hopeless(self, first: int, last: int, stage: int) -> bool:
        """Whether what only grows with more layers is already over the limit."""
        figures = self._figures(first, last)
        return self._states(figures) + self.in_flight[stage] * figures.saved_bytes > self.limit_bytes[stage]

    def _step(self, figures: StageFigures) -> int:
        if self.sharing is not None:
            return _shared_states(self.sharing, figures, 0, accelerated=self.accelerated)[1]
        return _temporary_bytes(figures, self.profile, self.temporaries) + _wide_gradients([figures], self.profile)

    def _states(self, figures: StageFigures) -> int:
        if self.sharing is not None:
            return _shared_states(self.sharing, figures, 0, accelerated=self.accelerated)[0].total
        optimizer = self.profile.optimizer_bytes_per_gradient_byte * figures.gradient_bytes
        return figures.weight_bytes + figures.gradient_bytes + round(optimizer)


def _states(stages: Sequence[StageFigures], profile: ModelProfile, batch_bytes: int) -> MemoryParts:
    """What a rank holds all the time."""
    gradients = sum(stage.gradient_bytes for stage in stages)
    return MemoryParts(
        weights=sum(stage.weight_bytes for stage in stages),
        gradients=gradients,
        optimizer=round(profile.optimizer_bytes_per_gradient_byte * gradients),
        activations=0,
        buffers=batch_bytes,
    )


def _shared_states(
    sharing: ZeroSharing, stage: StageFigures, batch_bytes: int, *, accelerated: bool
) -> tuple[MemoryParts, int]:
    """What a rank holds at the end of its backwards, and what its update takes more than that."""
    held, more = sharing.held(stage), sharing.backward_extra(stage)
    here = 0 if accelerated else held.host  # what is offloaded stays in the one memory
    update = sharing.update_extra(stage) + (0 if accelerated else sharing.update_extra_host(stage))
    states = MemoryParts(
        weights=held.weights + more.weights,
        gradients=held.gradients + more.gradients,
        optimizer=held.optimizer + here,
        activations=0,
        buffers=held.buffers + more.buffers + batch_bytes,
    )
    return states, max(0, update - more.device)


def _wide_gradients(stages: Sequence[StageFigures], profile: ModelProfile) -> int:
    """The fp32 gradients of master weights, which a step makes and drops for all stages of a rank together."""
    return round(profile.master_bytes_per_gradient_byte * sum(stage.gradient_bytes for stage in stages))


def _temporary_bytes(figures: StageFigures, profile: ModelProfile, temporaries: int) -> int:
    width = profile.master_bytes_per_gradient_byte or 1.0
    return round(temporaries * width * figures.largest_parameter_bytes)


class _RankWalk:
    """One rank's live bytes, action by action."""

    def __init__(
        self, schedule: Schedule, rank: int, figures: Sequence[StageFigures], states: MemoryParts, step_bytes: int
    ) -> None:
        self._schedule = schedule
        self._rank = rank
        self._figures = figures
        self._states = states
        self._step_bytes = step_bytes
        self._activations = 0
        self._held = 0  # boundary tensors
        self._leaving: dict[int, int] = {}  # stage -> bytes of its last gradient message, still on its way
        self._peak = (0, 0, 0)  # activations, held, optimizer temporaries: at the moment when their sum was largest

    def peak(self, actions: Sequence[Action]) -> MemoryParts:
        """The parts at the peak over these actions."""
        for action in actions:
            self._play(action)
        activations, held, step = self._peak
        states = self._states
        return MemoryParts(
            weights=states.weights,
            gradients=states.gradients,
            optimizer=states.optimizer + step,
            activations=activations,
            buffers=states.buffers + held,
        )

    def _play(self, action: Action) -> None:
        figures = self._figures[action.stage]
        if action.op is Op.F:
            self._see(figures.forward_peak_bytes)
            self._activations += figures.saved_bytes
        elif action.op is Op.B or action.op is Op.I:
            self._backward(action, figures)
        elif action.op is Op.W:
            self._see(0)
            self._release(action, figures)
        elif action.op is Op.RECV:
            self._held += figures.input_bytes if action.payload is Payload.ACTIVATION else figures.output_bytes
        elif action.op is Op.SEND and action.payload is Payload.GRADIENT:
            self._held -= self._leaving.pop(action.stage, 0)
            self._leaving[action.stage] = figures.input_bytes
        elif action.op is Op.STEP:
            self._see(0, step=self._step_bytes)

    def _backward(self, action: Action, figures: StageFigures) -> None:
        """B, or I, after which saved tensors and gradients stay for W. Both make the gradient of the input."""
        self._see(figures.backward_peak_bytes)
        self._held += figures.input_bytes
        if action.op is Op.B:
            self._release(action, figures)

    def _release(self, action: Action, figures: StageFigures) -> None:
        """What the end of a micro-batch's backward frees: what was saved, the input, the output's gradient."""
        self._activations -= figures.saved_bytes
        if not self._is_here(action.stage - 1, action):
            self._held -= figures.input_bytes
        self._held -= figures.output_bytes

    def _is_here(self, stage: int, action: Action) -> bool:
        """Whether a neighbouring stage lives on this rank too: its output is handed over, not received."""
        assert action.microbatch is not None  # compute actions have one
        return stage >= 0 and self._schedule.rank_of(stage, action.microbatch) == self._rank

    def _see(self, extra_activations: int, *, step: int = 0) -> None:
        seen = (self._activations + extra_activations, self._held, step)
        if sum(seen) > sum(self._peak):
            self._peak = seen
