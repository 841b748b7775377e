"""One rank's live bytes, action by action."""

from __future__ import annotations

from collections.abc import Sequence

from runner.plan.stages.figures import StageFigures
from runner.plan.values import MemoryParts
from runner.schedule.values import COMPUTE, CURVATURE, Action, Op, Payload, Schedule

__all__ = ["RankWalk"]


class RankWalk:
    """Plays a rank's list.

    Args:
        schedule: what the list was lowered from.
        rank: its pipe position.
        figures: of each stage.
        states: what the rank holds all the time.
        step_bytes: temporaries of the optimizer step.
    """

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
        self._leaving: dict[int, int] = {}  # stage -> bytes of its last gradient message, still on its way; -1: output
        self._inputs: dict[tuple[int, int], int] = {}  # stage, micro-batch -> of its input: W needs it, and it is held
        self._forwarded: set[tuple[int, int]] = set()
        self._to_sum: dict[Action, int] = {}  # K-FAC's sums to come -> bytes that nothing else keeps for them
        self._peak = (0, 0, 0)  # activations, held, optimizer temporaries: at the moment when their sum was largest

    def peak(self, actions: Sequence[Action]) -> MemoryParts:
        """The parts at the peak over these actions."""
        posted = 0
        for index, action in enumerate(actions):
            if action.op in COMPUTE:
                posted = self._post_ahead(actions, max(posted, index + 1))
            if index >= posted or action.op is not Op.RECV:
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

    def _post_ahead(self, actions: Sequence[Action], start: int) -> int:
        """Post the receives before the next compute, as the executor does; the index after the last one.

        The shape of a gradient is known once its forward has run.
        """
        posted = start
        for index in range(start, len(actions)):
            action = actions[index]
            if action.op in COMPUTE:
                break
            if action.op is Op.RECV:
                if action.payload is Payload.STASH and self._is_here(action.stage, action):
                    break  # another micro-batch leaves before this one is back
                known = _place(action) in self._forwarded or self._schedule.has_other_backward(action.stage)
                if action.payload is Payload.GRADIENT and not known:
                    break
                self._play(action)
                posted = index + 1
        return posted

    def _play(self, action: Action) -> None:
        figures = self._figures[action.stage]
        if action.op is Op.F:
            self._forwarded.add(_place(action))
            if self._schedule.has_curvature and self._schedule.window_at(action) == 0:
                self._to_sum |= {action._replace(op=op): 0 for op in (Op.CURV_A, Op.CURV_B)}
        if action.op is Op.F and self._schedule.has_other_backward(action.stage):
            self._forward_for_others(action, figures)
        elif action.op is Op.F and self._is_recomputed(action):
            self._see(figures.unsaved_forward_peak_bytes)
            self._activations += figures.output_bytes
        elif action.op is Op.F or action.op is Op.R:
            self._see(figures.forward_peak_bytes)
            self._activations += figures.saved_bytes
        elif action.op is Op.B or action.op is Op.I:
            self._backward(action, figures)
        elif action.op is Op.W:
            self._see(figures.largest_parameter_bytes)
            self._activations -= figures.deferred_bytes
            self._held -= self._inputs.pop(_place(action), 0)
        elif action.op in CURVATURE:
            self._see(figures.curvature.inversion_bytes if action.microbatch is None else 0)
            self._activations -= self._to_sum.pop(action._replace(window=0), 0)
        elif action.payload is Payload.STASH:
            self._move(action, figures)
        elif action.op is Op.RECV:
            is_gradient = action.payload is Payload.GRADIENT
            self._held += figures.output_gradient_bytes if is_gradient else figures.input_bytes
        elif action.op is Op.SEND and action.payload is Payload.GRADIENT:
            self._held -= self._leaving.pop(action.stage, 0)
            self._leaving[action.stage] = figures.input_gradient_bytes
        elif action.op is Op.STEP:
            self._see(0, step=self._step_bytes)

    def _forward_for_others(self, action: Action, figures: StageFigures) -> None:
        """A forward whose backward is on another rank: its output alone stays, until the next one's has left."""
        self._see(figures.unsaved_forward_peak_bytes)
        self._held += figures.output_bytes - self._leaving.pop(-1, 0)
        self._leaving[-1] = figures.output_bytes
        if action.stage > 0:
            self._held -= figures.input_bytes
        following = action._replace(stage=action.stage + 1)
        if self._schedule.has_other_backward(following.stage) and self._is_here(following.stage, following, Op.B):
            self._held += figures.output_bytes  # for the recomputation of the next stage

    def _move(self, action: Action, figures: StageFigures) -> None:
        """What a stage keeps of a micro-batch leaves or is back on its rank, comes to its host or leaves that."""
        sign = 1 if action.op is Op.RECV else -1
        if self._is_here(action.stage, action):
            self._activations += sign * figures.saved_bytes
            self._held += sign * figures.input_bytes
        else:
            self._held += sign * (figures.saved_bytes + figures.input_bytes)

    def _backward(self, action: Action, figures: StageFigures) -> None:
        """B, or I, after which some of it stays for W. Both make the gradient of the input and use the output's."""
        split = action.op is Op.I
        inputs, gradients = self._keep_for_sums(action, figures)
        peak = figures.input_backward_peak_bytes if split else figures.backward_peak_bytes
        self._see(max(peak, figures.curvature.backward_bytes[inputs > 0] if gradients else 0))
        self._activations += inputs + gradients
        self._held += figures.input_gradient_bytes - figures.output_gradient_bytes
        kept = self._is_recomputed(action) and not self._schedule.has_other_backward(action.stage)
        self._activations -= figures.saved_bytes + (figures.output_bytes if kept else 0)
        if self._schedule.has_other_backward(action.stage) or not self._is_here(action.stage - 1, action):
            self._held -= figures.input_bytes
        if split:
            self._activations += figures.deferred_bytes
            self._hold_input(action, figures.deferred_input_bytes)

    def _keep_for_sums(self, action: Action, figures: StageFigures) -> tuple[int, int]:
        """Bytes of the layers' inputs, and of their outputs' gradients, that stay for K-FAC after this backward.

        Until then autograd keeps the inputs.
        """
        kept = [0, 0]
        for side, op in enumerate((Op.CURV_A, Op.CURV_B)):
            item = action._replace(op=op)
            if item in self._to_sum:
                kept[side] = self._to_sum[item] = figures.curvature.kept_bytes[side]
        return kept[0], kept[1]

    def _hold_input(self, action: Action, num_bytes: int) -> None:
        """What W needs of the stage's input stays.

        Where the stage before is here, that input is its output, so that it is counted twice until its own backward,
        which follows.
        """
        self._inputs[_place(action)] = num_bytes
        self._held += num_bytes

    def _is_recomputed(self, action: Action) -> bool:
        assert action.microbatch is not None  # compute actions have one
        return self._schedule.is_recomputed(action.stage, action.microbatch)

    def _is_here(self, stage: int, action: Action, op: Op = Op.F) -> bool:
        """Whether a neighbouring stage lives on this rank too: its output is handed over, not received."""
        assert action.microbatch is not None  # compute actions have one
        return stage >= 0 and self._schedule.rank_of(stage, action.microbatch, op) == self._rank

    def _see(self, extra_activations: int, *, step: int = 0) -> None:
        seen = (self._activations + extra_activations, self._held, step)
        if sum(seen) > sum(self._peak):
            self._peak = seen


def _place(action: Action) -> tuple[int, int]:
    assert action.microbatch is not None  # compute actions have one
    return action.stage, action.microbatch
