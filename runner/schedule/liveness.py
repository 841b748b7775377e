"""Defines what is alive on a rank, and from which action to which. Only this module does.

The simulator counts micro-batches with it, the plan counts bytes, and a test compares the engine's buffers with it.

Tensors are alive from the end of the action that makes them to the end of the action that uses them last. There is one
exception: the tensors that autograd saves grow while their F or R runs, so they count from the beginning of that
action.

In a program, messages bring boundary tensors and take them away. A schedule has no messages: there, a boundary tensor
from another rank is alive from the forward or recomputation that uses it, and gradients that go from rank to rank are
left out.

A message that leaves is held until the rank's next one starts, of whichever stage: the engine drops it then, if it has
left. Where a link or the peer is slower than this rank, more of them may be on their way, which is not counted. After
a window's last message, the next one is in the next window: so the actions begin with the last message of the window
before.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from runner.schedule.values import COMPUTE, Action, Op, Payload, Program, Schedule

__all__ = ["ACTIVATIONS", "Kind", "Lifetime", "change_in_flight", "lifetimes", "most_at_once", "weight_lifetimes"]


class Kind(StrEnum):
    """The kinds of things that are alive on a rank."""

    SAVED = "saved"  # tensors that autograd saves of a forward or its recomputation, including the stage's output
    STASH = "stash"  # saved tensors and input of another rank's stage, which this rank keeps for a while
    DEFERRED = "deferred"  # tensors that I leaves to W
    OUTPUT = "output"  # the stage's output, kept by a forward that saves nothing because it is recomputed
    INPUT = "input"  # the stage's input in memory of its own: it came from another rank, or its maker keeps nothing
    OUTPUT_GRADIENT = "output gradient"  # the gradient of the stage's output, until the backward that uses it has ended
    INPUT_GRADIENT = "input gradient"  # the gradient of the stage's input, until its message is started
    LEAVING_GRADIENT = "leaving gradient"  # a message, until the rank's next one that leaves starts
    LEAVING_OUTPUT = "leaving output"  # a message of a forward that keeps nothing, until the same moment
    LEFT_TO_FILL = "left to a fill"  # tensors that a fill of a micro-batch needs and autograd no longer keeps
    WEIGHTS = "weights"  # one version of a stage's weights


ACTIVATIONS = frozenset({Kind.SAVED, Kind.STASH, Kind.DEFERRED})
"""The kinds that count as activations of a micro-batch."""


class Lifetime(NamedTuple):
    """One thing that is alive on a rank, from one action to another.

    Args:
        rank: the pipeline rank in whose memory it is.
        kind: its kind.
        stage: the stage to which it belongs.
        microbatch: its micro-batch; None for weights, which serve many micro-batches.
        begins: the action at whose end it exists (for SAVED, the F or R at whose beginning it begins to grow); None
            means that it exists from the start.
        ends: the action at whose end it is released; None means that it stays.
        version: for weights, the number of optimizer steps that have made them; otherwise 0.
        fill: for tensors that are left to a fill, the name of the fill's kind; otherwise None.
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
        """Whether it counts already while the action runs that makes it."""
        return self.kind is Kind.SAVED and self.begins is not None and self.begins.op in (Op.F, Op.R)


def lifetimes(
    view: Schedule | Program, rows: Sequence[Sequence[Action]] | None = None
) -> tuple[tuple[Lifetime, ...], ...]:
    """For each rank, the lifetimes of everything on it except weights. The time is linear in the number of actions.

    Args:
        view: a schedule or a program.
        rows: the ranks' lists, with the same actions as in ``view``, if ranks run them in another order.
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
    """Walks the list of one rank, and records which lifetimes each action begins and ends.

    Attributes:
        found: the lifetimes on this rank.
        lent: for a schedule, the lifetimes of tensors of this rank's stages on other ranks.
    """

    def __init__(self, view: Schedule | Program, rank: int) -> None:
        self.found: list[Lifetime] = []
        self.lent: list[Lifetime] = []
        self._lowered = isinstance(view, Program)
        self._schedule = view.schedule if isinstance(view, Program) else view
        self._rank = rank
        self._alive: dict[tuple[Kind, int, int | None], Action] = {}  # kind, stage, micro-batch -> action that began it
        self._leaving: tuple[Kind, int, int | None] | None = None  # the last message: kind, stage, micro-batch
        self._first_leaving: Action | None = None
        self._left: dict[Action, Action] = {}  # fill -> the backward that left tensors to it
        self._filled: set[Action] = set()

    def play(self, action: Action) -> None:
        """Record the lifetimes that an action begins and ends."""
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
            assert action.peer is not None  # a move names the rank that keeps the tensors
            begins = self._alive.pop((Kind.STASH, action.stage, action.microbatch))
            self.lent.append(Lifetime(action.peer, Kind.STASH, action.stage, action.microbatch, begins, action))
        elif action.payload is Payload.STASH:
            self._move(action)
        elif op is Op.RECV:
            self._begin(Kind.OUTPUT_GRADIENT if action.payload is Payload.GRADIENT else Kind.INPUT, action)
        elif op is Op.SEND and action.payload is Payload.GRADIENT:
            self._end(Kind.INPUT_GRADIENT, action)
            self._begin_leaving(Kind.LEAVING_GRADIENT, action)

    def end(self) -> None:
        """Record everything that is still alive, and what was alive at the start because it is still alive now."""
        if self._leaving is not None:
            self.found.append(Lifetime(self._rank, *self._leaving, None, self._first_leaving))
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
            stays = self._is_here(stage + 1, action, Op.F)
            if not stays:
                self._begin_leaving(Kind.LEAVING_OUTPUT, action)
            if stays or (schedule.has_other_backward(stage + 1) and self._is_here(stage + 1, action, Op.R)):
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
        """In a schedule, which has no messages, an input from another rank begins to live when it is used."""
        source = action.stage - 1
        if self._lowered or source < 0 or self._is_here(source, action, Op.F):
            return
        if (Kind.INPUT, action.stage, action.microbatch) not in self._alive:
            self._begin(Kind.INPUT, action)

    def _move(self, action: Action) -> None:
        """Record a message with a stash: on its owner's rank it leaves or returns, on its host it comes or goes."""
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
        """End a lifetime; if the tensor had no memory of its own, nothing was alive and nothing is done."""
        begins = self._alive.pop((kind, action.stage, action.microbatch), None)
        if begins is not None:
            self.found.append(Lifetime(self._rank, kind, action.stage, action.microbatch, begins, action))

    def _begin_leaving(self, kind: Kind, action: Action) -> None:
        """Begin the lifetime of a message on its way; the engine drops the one before it now."""
        self._first_leaving = self._first_leaving or action
        if self._leaving is not None:
            self.found.append(Lifetime(self._rank, *self._leaving, self._alive.pop(self._leaving), action))
        self._leaving = (kind, action.stage, action.microbatch)
        self._begin(kind, action)

    def _is_here(self, stage: int, action: Action, op: Op) -> bool:
        """Whether this rank runs ``op`` of a stage for the action's micro-batch."""
        assert action.microbatch is not None  # every compute action and message has one
        return self._schedule.rank_of(stage, action.microbatch, op) == self._rank


def _is_recomputed(schedule: Schedule, action: Action) -> bool:
    assert action.microbatch is not None  # a forward has one
    return schedule.is_recomputed(action.stage, action.microbatch)


def most_at_once(
    row: Sequence[Action], living: Iterable[Lifetime], size_of: Callable[[int | None], float] = lambda _: 1
) -> float:
    """The largest number of things that are alive on one rank at the same time, or the sum of their sizes.

    Args:
        row: the rank's list.
        living: lifetimes on this rank, which begin and end with actions of this list.
        size_of: the size of what belongs to a micro-batch.
    """
    growing: dict[Action | None, float] = defaultdict(int)
    more: dict[Action | None, float] = defaultdict(int)
    for each in living:
        size = size_of(each.microbatch)
        (growing if each.grows else more)[each.begins] += size
        more[each.ends] -= size * (each.ends is not None)
    alive = most = more[None]
    for action in row:
        alive += growing[action]
        most = max(most, alive)
        alive += more[action]
        most = max(most, alive)
    return most


def change_in_flight(action: Action) -> int:
    """The change, when an action has run, in the number of micro-batches between F and the end of their backward."""
    return (action.op is Op.F) - (action.op in (Op.B, Op.W))


def weight_lifetimes(view: Schedule | Program) -> tuple[tuple[Lifetime, ...], ...]:
    """For each rank, the lifetimes of the versions of its stages' weights.

    Version v is made by the optimizer step of window v - 1; version 0 exists from the start. A version is alive until
    the step of window v has replaced it and the last action that reads it has ended; the newest version stays. Where
    each pipeline trains weights of its own, these live all the time, and the versions are those of their average. A
    program contains its steps. A schedule does not; there, the last action before a step stands for it.
    """
    return tuple(tuple(_versions(view, rank)) for rank in range(view.ranks))


def _versions(view: Schedule | Program, rank: int) -> Iterator[Lifetime]:
    schedule = view.schedule if isinstance(view, Program) else view
    position: dict[Action | None, int] = {action: index for index, action in enumerate(view.actions[rank])}
    last_reader: dict[tuple[int, int], Action] = {}  # stage, version -> the last action that reads it
    for action in view.actions[rank]:
        if action.op in COMPUTE - {Op.FILL} and action.microbatch is not None:
            version = schedule.version_read(action.stage, action.microbatch, action.op)
            last_reader[action.stage, version] = action
    steps = _steps(view, rank)
    for stage in schedule.stages_of(rank):
        for _ in range(schedule.trained_copies if schedule.own_weights else 0):
            yield Lifetime(rank, Kind.WEIGHTS, stage, None, None, None)
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
    """Stage, window -> the action of a rank's list at whose end the stage's weights have been updated."""
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
