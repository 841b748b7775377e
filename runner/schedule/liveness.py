"""What is alive on a rank, and from which action to which: the one statement of it.

The simulator counts micro-batches with it, the plan counts bytes, and a test holds the engine's buffers against it.

Something begins to live at the end of the action that makes it, and ends to live at the end of the action that uses it
last. One thing is an exception: what autograd saves grows while its F or R runs, so it counts from the beginning of
that action.

In a program, messages bring boundary tensors and take them away. A schedule knows no messages: there, a boundary tensor
from another rank lives from the forward or recomputation that uses it, and gradients that go from rank to rank are
left out.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from runner.schedule.values import COMPUTE, Action, Op, Payload, Program, Schedule

__all__ = ["ACTIVATIONS", "Kind", "Lifetime", "change_in_flight", "lifetimes", "most_at_once", "weight_lifetimes"]


class Kind(StrEnum):
    """What something is that lives on a rank."""

    SAVED = "saved"  # what autograd saves of a forward or of its recomputation, the stage's output included
    STASH = "stash"  # what another rank's stage saved of a micro-batch, and its input, kept here meanwhile
    DEFERRED = "deferred"  # what I leaves to W
    OUTPUT = "output"  # the stage's output, kept by a forward that saves nothing because it is recomputed
    INPUT = "input"  # the stage's input, in memory of its own: it came from another rank, or its maker keeps nothing
    OUTPUT_GRADIENT = "output gradient"  # the gradient of the stage's output, until the backward that uses it has ended
    INPUT_GRADIENT = "input gradient"  # the gradient of the stage's input, until its message is started
    LEAVING_GRADIENT = "leaving gradient"  # a message, which is known to have left when the stage's next one starts
    LEAVING_OUTPUT = "leaving output"  # of a forward that keeps nothing: known to have left at the rank's next one
    LEFT_TO_FILL = "left to a fill"  # what a fill of a micro-batch needs, and autograd no longer keeps
    WEIGHTS = "weights"  # one version of a stage's weights


ACTIVATIONS = frozenset({Kind.SAVED, Kind.STASH, Kind.DEFERRED})
"""What is counted as a micro-batch's activations."""


class Lifetime(NamedTuple):
    """One thing that lives on a rank.

    Args:
        rank: the pipeline rank whose memory it is in.
        kind: what it is.
        stage: the stage that it belongs to.
        microbatch: its micro-batch; None for weights, which serve many.
        begins: the action at whose end it is there (SAVED: at the beginning of its F or R); None: it is there from
            the start.
        ends: the action at whose end it is gone; None: it stays.
        version: of weights: how many optimizer steps made them; otherwise 0.
        fill: of what is left to a fill: the name of its kind; otherwise None.
    """

    rank: int
    kind: Kind
    stage: int
    microbatch: int | None
    begins: Action | None
    ends: Action | None
    version: int = 0
    fill: str | None = None

    @property
    def grows(self) -> bool:
        """Whether it is there already while the action runs that begins it."""
        return self.kind is Kind.SAVED and self.begins is not None and self.begins.op in (Op.F, Op.R)


def lifetimes(
    view: Schedule | Program, rows: Sequence[Sequence[Action]] | None = None
) -> tuple[tuple[Lifetime, ...], ...]:
    """Per rank, everything but weights that lives on it. Linear in the number of actions.

    Args:
        view: a schedule or a program.
        rows: the ranks' lists where these run in another order than ``view`` says; the same actions.
    """
    ranks = [_Rank(view, rank) for rank in range(view.ranks)]
    for rank, row in zip(ranks, view.actions if rows is None else rows, strict=True):
        for action in row:
            rank.play(action)
        rank.end()
    for lent in [each for rank in ranks for each in rank.lent]:
        ranks[lent.rank].found.append(lent)
    return tuple(tuple(rank.found) for rank in ranks)


class _Rank:
    """Walks one rank's list, and notes what each action begins and ends.

    Attributes:
        found: what has lived on this rank.
        lent: of a schedule: what this rank's stages keep on other ranks.
    """

    def __init__(self, view: Schedule | Program, rank: int) -> None:
        self.found: list[Lifetime] = []
        self.lent: list[Lifetime] = []
        self._lowered = isinstance(view, Program)
        self._schedule = view.schedule if isinstance(view, Program) else view
        self._rank = rank
        self._alive: dict[tuple[Kind, int, int | None], Action] = {}  # kind, stage, micro-batch -> what began it
        self._leaving: dict[tuple[Kind, int], tuple[Kind, int, int | None]] = {}  # the last message of its kind
        self._left: dict[Action, Action] = {}  # the fill that something is left to -> the backward that left it
        self._filled: set[Action] = set()

    def play(self, action: Action) -> None:
        """Note what an action begins and ends."""
        op = action.op
        if op is Op.F:
            self._forward(action)
        elif op is Op.R:
            self._use_input(action)
            self._begin(Kind.SAVED, action)
        elif op is Op.B or op is Op.I:
            self._backward(action)
        elif op is Op.W:
            self._end(Kind.DEFERRED, action)
        elif op is Op.FILL:
            self._fill(action)
        elif op is Op.OUT:
            self._leave(action)
            self._begin(Kind.STASH, action)
        elif op is Op.IN:
            self._return(action)
            assert action.peer is not None  # a move names the rank that keeps what leaves
            begins = self._alive.pop((Kind.STASH, action.stage, action.microbatch))
            self.lent.append(Lifetime(action.peer, Kind.STASH, action.stage, action.microbatch, begins, action))
        elif action.payload is Payload.STASH:
            self._move(action)
        elif op is Op.RECV:
            self._begin(Kind.OUTPUT_GRADIENT if action.payload is Payload.GRADIENT else Kind.INPUT, action)
        elif op is Op.SEND and action.payload is Payload.GRADIENT:
            self._end(Kind.INPUT_GRADIENT, action)
            self._begin_leaving(Kind.LEAVING_GRADIENT, action, action.stage)

    def end(self) -> None:
        """Note what is still there."""
        for (kind, stage, microbatch), begins in self._alive.items():
            self.found.append(Lifetime(self._rank, kind, stage, microbatch, begins, None))
        for fill, begins in self._left.items():
            self.found.append(self._left_to(fill, begins, None))

    def _forward(self, action: Action) -> None:
        schedule, stage = self._schedule, action.stage
        elsewhere = schedule.has_other_backward(stage)
        self._use_input(action)
        self._begin(Kind.SAVED, action)
        if not schedule.backward or _is_recomputed(schedule, action):
            self._end(Kind.SAVED, action)
        if not schedule.backward or elsewhere:
            self._end(Kind.INPUT, action)
        elif _is_recomputed(schedule, action):
            self._begin(Kind.OUTPUT, action)
        if schedule.backward and elsewhere and stage + 1 < schedule.stages:
            self._begin_leaving(Kind.LEAVING_OUTPUT, action, 0)
            if schedule.has_other_backward(stage + 1) and self._is_here(stage + 1, action, Op.R):
                self._begin(Kind.INPUT, action, stage + 1)

    def _backward(self, action: Action) -> None:
        schedule, stage = self._schedule, action.stage
        for kind in (Kind.SAVED, Kind.OUTPUT, Kind.INPUT, Kind.OUTPUT_GRADIENT):
            self._end(kind, action)
        if action.op is Op.I:
            self._begin(Kind.DEFERRED, action)
        if stage > 0 and self._is_here(stage - 1, action, Op.B):
            self._begin(Kind.OUTPUT_GRADIENT, action, stage - 1)
        elif stage > 0 and self._lowered:
            self._begin(Kind.INPUT_GRADIENT, action)
        if schedule.filling is not None and schedule.window_at(action) == 0:
            for each in schedule.filling.kinds:
                fill = action._replace(op=Op.FILL, fill=each.name)
                if each.of_microbatch and fill not in self._filled:
                    self._left[fill] = action

    def _fill(self, action: Action) -> None:
        fill = action._replace(window=0)
        self._filled.add(fill)
        begins = self._left.pop(fill, None)
        if begins is not None:
            self.found.append(self._left_to(fill, begins, action))

    def _left_to(self, fill: Action, begins: Action, ends: Action | None) -> Lifetime:
        return Lifetime(self._rank, Kind.LEFT_TO_FILL, fill.stage, fill.microbatch, begins, ends, fill=fill.fill)

    def _use_input(self, action: Action) -> None:
        """Without messages, the input of another rank's stage is there when it is used."""
        source = action.stage - 1
        if self._lowered or source < 0 or self._is_here(source, action, Op.F):
            return
        if (Kind.INPUT, action.stage, action.microbatch) not in self._alive:
            self._begin(Kind.INPUT, action)

    def _move(self, action: Action) -> None:
        """A message that takes away, or brings, what a stage keeps of a micro-batch."""
        if self._is_here(action.stage, action, Op.F):
            self._leave(action) if action.op is Op.SEND else self._return(action)
        elif action.op is Op.RECV:
            self._begin(Kind.STASH, action)
        else:
            self._end(Kind.STASH, action)

    def _leave(self, action: Action) -> None:
        self._end(Kind.SAVED, action)
        self._end(Kind.INPUT, action)

    def _return(self, action: Action) -> None:
        self._begin(Kind.SAVED, action)
        if action.stage > 0 and not self._is_here(action.stage - 1, action, Op.F):
            self._begin(Kind.INPUT, action)

    def _begin(self, kind: Kind, action: Action, stage: int | None = None) -> None:
        self._alive[kind, action.stage if stage is None else stage, action.microbatch] = action

    def _end(self, kind: Kind, action: Action) -> None:
        """End what is alive; of what had no memory of its own, nothing is."""
        begins = self._alive.pop((kind, action.stage, action.microbatch), None)
        if begins is not None:
            self.found.append(Lifetime(self._rank, kind, action.stage, action.microbatch, begins, action))

    def _begin_leaving(self, kind: Kind, action: Action, lane: int) -> None:
        """A message is on its way; the one before it on the same lane has left by now."""
        before = self._leaving.get((kind, lane))
        if before is not None:
            self.found.append(Lifetime(self._rank, *before, self._alive.pop(before), action))
        self._leaving[kind, lane] = (kind, action.stage, action.microbatch)
        self._begin(kind, action)

    def _is_here(self, stage: int, action: Action, op: Op) -> bool:
        """Whether this rank runs ``op`` of a stage for the action's micro-batch."""
        assert action.microbatch is not None  # compute and messages have one
        return self._schedule.rank_of(stage, action.microbatch, op) == self._rank


def _is_recomputed(schedule: Schedule, action: Action) -> bool:
    assert action.microbatch is not None  # a forward has one
    return schedule.is_recomputed(action.stage, action.microbatch)


def most_at_once(row: Sequence[Action], living: Iterable[Lifetime]) -> int:
    """How many things of one rank are alive at the same time, at most.

    Args:
        row: the rank's list.
        living: lifetimes on this rank that begin and end with actions of this list.
    """
    growing: dict[Action | None, int] = defaultdict(int)
    more: dict[Action | None, int] = defaultdict(int)
    for each in living:
        (growing if each.grows else more)[each.begins] += 1
        more[each.ends] -= each.ends is not None
    alive = most = more[None]
    for action in row:
        alive += growing[action]
        most = max(most, alive)
        alive += more[action]
        most = max(most, alive)
    return most


def change_in_flight(action: Action) -> int:
    """How many more micro-batches a rank has between their F and the end of their backward, once an action has run."""
    return (action.op is Op.F) - (action.op in (Op.B, Op.W))


def weight_lifetimes(view: Schedule | Program) -> tuple[tuple[Lifetime, ...], ...]:
    """Per rank, the versions of its stages' weights.

    Version v is made by the optimizer step of window v - 1; version 0 is there from the start. It lives until the step
    of window v has replaced it and the last action that reads it has ended; the newest one stays. A program holds its
    steps; in a schedule the action that a step directly follows stands for it.
    """
    return tuple(tuple(_versions(view, rank)) for rank in range(view.ranks))


def _versions(view: Schedule | Program, rank: int) -> Iterator[Lifetime]:
    schedule = view.schedule if isinstance(view, Program) else view
    position: dict[Action | None, int] = {action: index for index, action in enumerate(view.actions[rank])}
    last_reader: dict[tuple[int, int], Action] = {}  # stage, version -> what reads it last
    for action in view.actions[rank]:
        if action.op in COMPUTE - {Op.FILL}:
            version = schedule.version_read(action.stage, schedule.window_at(action))
            last_reader[action.stage, version] = action
    steps = _steps(view, rank)
    for stage in schedule.stages_of(rank):
        made: Action | None = None
        for version in itertools.count():
            replaced = steps.get((stage, version))
            users = last_reader.get((stage, version)), replaced
            ends = replaced and max(users, key=lambda action: position.get(action, -1))
            yield Lifetime(rank, Kind.WEIGHTS, stage, None, made, ends, version)
            if replaced is None:
                break
            made = replaced


def _steps(view: Schedule | Program, rank: int) -> dict[tuple[int, int], Action]:
    """Stage and window to the action of a rank's list at whose end the stage's weights have been updated."""
    if isinstance(view, Program):
        return {(each.stage, each.window): each for each in view.actions[rank] if each.op is Op.STEP}
    if not view.backward:
        return {}
    together = not view.is_asynchronous
    last: dict[tuple[int, int], Action] = {}
    for action in view.actions[rank]:
        if action.op in (COMPUTE if together else (Op.B, Op.W)):
            for stage in view.stages_of(rank) if together else (action.stage,):
                last[stage, view.window_at(action)] = action
    return last
