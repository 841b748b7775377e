"""Adds up the live bytes of one rank, action by action, from the lifetimes of what it holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from runner.plan.reductions import Reduction
from runner.plan.stages.figures import StageFigures
from runner.plan.stages.on_the_way import OnTheWay
from runner.plan.values import MemoryParts
from runner.schedule.liveness import Kind, Lifetime
from runner.schedule.values import COMPUTE, Action, Op, Payload, Schedule

__all__ = ["HeldBytes", "Moment", "RankWalk"]


class Moment(Enum):
    """The kinds of moments that differ in what a rank holds beside activations and buffers."""

    NO_GRADIENTS_YET = auto()  # of the backward that runs, or that comes next
    COMPUTING = auto()
    UPDATING = auto()


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """What a rank holds beside activations and boundary tensors.

    Args:
        states: what it holds all the time.
        step_bytes: temporary tensors of its optimizer step.
        with_gradients: the part of ``states`` that is not there before a backward makes its first gradient of a weight.
    """

    states: MemoryParts
    step_bytes: int = 0
    with_gradients: MemoryParts = MemoryParts(0, 0, 0, 0, 0)

    def at(self, moment: Moment, activations: int, buffers: int) -> MemoryParts:
        """The parts at a moment with so many bytes of activations and boundary tensors."""
        states, later = self.states, self.with_gradients
        if moment is Moment.NO_GRADIENTS_YET:
            states = MemoryParts(*(getattr(states, part) - more for part, more in later.as_dict().items()))
        step = self.step_bytes if moment is Moment.UPDATING else 0
        buffered = states.buffers + buffers
        return replace(states, optimizer=states.optimizer + step, activations=activations, buffers=buffered)


class RankWalk:
    """Walks a rank's list and adds up the bytes that are alive.

    Args:
        schedule: the schedule from which the list was lowered.
        rank: the rank's position in its pipeline.
        figures: the figures of each stage.
        before_compute: for each stage, the bytes that are made and dropped before each forward and backward.
        reductions: what compressors need for each stage, from its last backward on; empty if there are none.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        figures: Sequence[StageFigures],
        before_compute: Sequence[int],
        reductions: Sequence[Reduction] = (),
    ) -> None:
        self._schedule = schedule
        self._rank = rank
        self._figures = figures
        self._before_compute = before_compute
        self._reductions = reductions
        self._room = max((figures[stage].leaving_bytes for stage in schedule.stages_of(rank)), default=0)
        self._on_the_way = OnTheWay(self._room)
        self._began: set[int] = set()  # the stages that have run a backward

    def peaks(
        self, actions: Sequence[Action], living: Iterable[Lifetime], held: Sequence[HeldBytes]
    ) -> tuple[MemoryParts, ...]:
        """For each replica, the parts at the moment when their sum is largest.

        Args:
            actions: the rank's list of a program.
            living: the lifetimes on the rank; see :func:`runner.schedule.liveness.lifetimes`.
            held: what each replica's rank holds.
        """
        moments = self._largest(actions, living)
        return tuple(max((own.at(*moment) for moment in moments), key=lambda parts: parts.total) for own in held)

    def _largest(self, actions: Sequence[Action], living: Iterable[Lifetime]) -> list[tuple[Moment, int, int]]:
        """For each kind of moment, the most activations and buffers at one time."""
        activations, buffers = defaultdict[Action | None, int](int), defaultdict[Action | None, int](int)
        left = defaultdict[Action | None, set[str]](set)  # backward -> the kinds of fills to which it leaves tensors
        for each in living:
            for changes, num_bytes in zip((activations, buffers), self._bytes(each), strict=True):
                if num_bytes:
                    changes[each.begins] += num_bytes - self._stays(each, each.begins)
                    if each.ends is not None:
                        changes[each.ends] -= num_bytes - self._stays(each, each.ends)
            if each.fill is not None and self._bytes(each)[0]:
                left[each.begins].add(each.fill)
        self._on_the_way, self._began = OnTheWay(self._room), set()
        peaks, alive, held = dict.fromkeys(Moment, (0, 0)), activations[None], buffers[None]
        waiting = 0  # of sums that have begun; the bytes of an update contain them
        for action in self._as_posted(actions):
            waiting = 0 if action.op is Op.STEP else waiting
            if action.op in COMPUTE or action.op is Op.STEP:
                transient = self._transient(action, frozenset(left.get(action, ())))
                if action.op is not Op.STEP:
                    transient = max(transient, self._before_compute[action.stage])
                buffered = held + waiting + self._cast_by(action)
                for moment, more in self._moments(action, transient):
                    peaks[moment] = max(peaks[moment], (alive + more, buffered), key=sum)
            if self._reductions and action.op is Op.REDUCE:  # other stages of the rank may still compute
                of_stage = self._reductions[action.stage]
                at_once = held + waiting + of_stage.temporary_bytes
                peaks[Moment.COMPUTING] = max(peaks[Moment.COMPUTING], (alive, at_once), key=sum)
                waiting += of_stage.waiting_bytes
            if action.op in (Op.B, Op.I):
                self._began.add(action.stage)
            alive += activations.get(action, 0)
            held += buffers.get(action, 0)
        return [(moment, *most) for moment, most in peaks.items()]

    def _moments(self, action: Action, transient: int) -> list[tuple[Moment, int]]:
        """The kinds of moments of an action, with the largest increase of activations in each."""
        if action.op is Op.STEP:
            return [(Moment.UPDATING, transient)]
        if action.op in (Op.F, Op.R):
            return [(Moment.NO_GRADIENTS_YET, transient)]
        if action.op is not Op.B:
            return [(Moment.COMPUTING, transient)]
        figures = self._figures_of(action)
        ends_lower = transient == figures.backward_peak_bytes  # otherwise something else than its layers counts, too
        later = figures.later_backward_peak_bytes if ends_lower else transient
        return [(Moment.NO_GRADIENTS_YET, transient), (Moment.COMPUTING, later)]

    def _figures_of(self, action: Action) -> StageFigures:
        """The figures of an action's stage, for the first backward of a step or for the others."""
        figures = self._figures[action.stage]
        is_first = action.op in (Op.B, Op.I) and action.stage not in self._began
        return figures.first_backward if is_first and figures.first_backward is not None else figures

    def _stays(self, each: Lifetime, at: Action | None) -> int:
        """What is there before something returns, or after it has left: the part of a stash that is not lent."""
        lent = each.kind is Kind.SAVED and at is not None and at.payload is Payload.STASH
        return self._figures[each.stage].copied_bytes if lent else 0

    def _as_posted(self, actions: Sequence[Action]) -> Iterator[Action]:
        """Yield the list, with receives where the engine posts them: before the compute action that they follow."""
        posted, forwarded = 0, set[tuple[int, int | None]]()
        for index, action in enumerate(actions):
            if action.op in COMPUTE:
                start = max(posted, index + 1)
                for at in self._posted_ahead(actions, start, forwarded):
                    posted = at + 1
                    yield actions[at]
            if action.op is Op.F:
                forwarded.add((action.stage, action.microbatch))
            if index >= posted or action.op is not Op.RECV:
                yield action

    def _posted_ahead(
        self, actions: Sequence[Action], start: int, forwarded: set[tuple[int, int | None]]
    ) -> Iterator[int]:
        """Yield the indices of receives, from ``start`` to the next compute, that can be posted early.

        A gradient is received after its own forward.
        """
        for index in range(start, len(actions)):
            action = actions[index]
            if action.op in COMPUTE:
                return
            if action.op is not Op.RECV:
                continue
            if action.payload is Payload.STASH and self._is_own(action):
                return  # another micro-batch must leave before this one comes back
            known = (action.stage, action.microbatch) in forwarded or self._schedule.has_other_backward(action.stage)
            if action.payload is Payload.GRADIENT and not known:
                return
            yield index

    def _is_own(self, action: Action) -> bool:
        """Whether the forward of the action's stage runs on this rank, so that its stash belongs to this rank."""
        assert action.microbatch is not None  # every message has one
        return self._schedule.rank_of(action.stage, action.microbatch) == self._rank

    def _bytes(self, each: Lifetime) -> tuple[int, int]:
        """The bytes of something with this lifetime, as activations and as other buffers.

        The figures are of the largest micro-batch; those of a smaller one are its part of them.
        """
        whole, buffered = self._bytes_of_largest(each)
        part = self._schedule.part_of_largest(each.microbatch)
        return (whole, buffered) if part == 1 else (math.ceil(whole * part), math.ceil(buffered * part))

    def _bytes_of_largest(self, each: Lifetime) -> tuple[int, int]:
        figures = self._figures[each.stage]
        match each.kind:
            case Kind.SAVED:
                return figures.saved_bytes, 0 if self._is_made_again_here(each) else self._cast_bytes(each.stage)
            case Kind.STASH:
                return 0, figures.saved_bytes - figures.copied_bytes + figures.input_bytes
            case Kind.DEFERRED:
                return figures.deferred_bytes, figures.deferred_input_bytes
            case Kind.OUTPUT:
                return figures.output_bytes, self._cast_bytes(each.stage)
            case Kind.INPUT:
                return 0, figures.input_bytes
            case Kind.OUTPUT_GRADIENT:
                return 0, figures.output_gradient_bytes
            case Kind.INPUT_GRADIENT | Kind.LEAVING_GRADIENT:
                return 0, figures.input_gradient_bytes
            case Kind.LEAVING_OUTPUT:
                return 0, figures.output_bytes
            case Kind.LEFT_TO_FILL:
                return figures.fills.kept_bytes.get(each.fill or "", 0), 0
            case Kind.WEIGHTS:
                return 0, 0  # the rank's states count them

    def _cast_bytes(self, stage: int) -> int:
        """The copy of the first stage's input in the format of the weights, which lives as long as what it saves."""
        return self._figures[stage].input_bytes if stage == 0 else 0

    def _cast_by(self, action: Action) -> int:
        """The bytes of that copy if the action makes it: they are held only from its end on."""
        makes = action.op is Op.F or (action.op is Op.R and not self._is_made_again_here(action))
        return self._cast_bytes(action.stage) if makes else 0

    def _is_made_again_here(self, at: Action | Lifetime) -> bool:
        """Whether R makes the graph on the rank of F, which has kept the input until then, beside the output."""
        stage, microbatch = at.stage, at.microbatch
        if microbatch is None or self._schedule.has_other_backward(stage):
            return False
        return self._schedule.is_recomputed(stage, microbatch)

    def _transient(self, action: Action, left: frozenset[str]) -> int:
        """The largest increase of activations, in bytes, while an action runs, with what is on its way to the host.

        Args:
            action: the action.
            left: for a backward, the kinds of fills to which it leaves tensors.
        """
        figures, way = self._figures_of(action), self._on_the_way
        if not (self._room and figures.moved_bytes) or action.op not in COMPUTE or self._keeps_nothing(action):
            return way.leaving_bytes + self._transient_alone(action, left)
        of = action.stage, action.microbatch
        match action.op:
            case Op.F | Op.R:
                return way.forward(of, figures.moved)
            case Op.B:
                fills = way.leaving_bytes + figures.fills.backward_bytes.get(left, 0)
                return max(way.backward(of, figures.moved), fills)
            case Op.I:
                return way.split_backward(of, figures.moved, self._transient_alone(action, left))
            case _:
                return way.leaving_bytes + self._transient_alone(action, left)

    def _transient_alone(self, action: Action, left: frozenset[str]) -> int:
        """The same as :meth:`_transient` if nothing is on its way."""
        figures = self._figures_of(action)
        match action.op:
            case Op.F if self._keeps_nothing(action):
                return figures.unsaved_forward_peak_bytes
            case Op.F | Op.R:
                return figures.forward_peak_bytes
            case Op.B | Op.I:
                split = action.op is Op.I
                own = figures.input_backward_peak_bytes if split else figures.backward_peak_bytes
                return max(own, figures.fills.backward_bytes.get(left, 0))
            case Op.W:
                return figures.weight_backward_peak_bytes
            case Op.FILL:
                return figures.fills.peak_bytes.get(action.work, 0)
            case _:
                return 0

    def _keeps_nothing(self, action: Action) -> bool:
        """Whether it is a forward whose stage is run forward again."""
        if action.op is not Op.F:
            return False
        assert action.microbatch is not None  # every forward has one
        return self._schedule.is_recomputed(action.stage, action.microbatch)
