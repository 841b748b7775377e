"""Actions, schedules and programs: plain values that can be printed, compared and hashed.

A schedule says which rank computes what, and in which order; it has no messages. A program is a schedule to which
:mod:`runner.schedule.lowering.program` has added messages, gradient reductions and optimizer steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from runner.schedule.fills import FILL_NAME, Filling
from runner.schedule.remembered import Remembering

__all__ = ["COMPUTE", "MOVES", "Action", "Op", "Payload", "Program", "Schedule", "parse_action", "shifted"]


class Op(StrEnum):
    """What an action does."""

    F = "F"  # forward
    B = "B"  # full backward: gradients of the input and of the weights
    I = "I"  # noqa: E741 - gradient of the input only; the literature's name
    W = "W"  # gradient of the weights only
    R = "R"  # recompute the forward
    FILL = "FILL"  # work that fills bubbles, such as an optimizer's; the action names its kind
    OUT = "OUT"  # the tensors that a stage keeps of a micro-batch for its backward go to another rank
    IN = "IN"  # these tensors come back
    SEND = "SEND"
    RECV = "RECV"
    REDUCE = "REDUCE"  # sum the gradients of one stage over its replicas
    STEP = "STEP"  # optimizer step of one stage


class Payload(StrEnum):
    """The content of a message."""

    ACTIVATION = "F"
    GRADIENT = "B"
    INPUT = "R"  # a stage's input, for a rank that recomputes a forward that another rank has run
    STASH = "S"  # the tensors that a stage keeps of a micro-batch for its backward


BACKWARDS = frozenset({Op.B, Op.I, Op.W})
"""The ops that compute gradients."""

COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W, Op.R, Op.FILL})
"""The ops that generators emit and that occupy a rank."""

MOVES = frozenset({Op.OUT, Op.IN})
"""The ops that generators emit and that occupy no rank, because tensors are moved while the rank computes."""

_NUMBER = "(0|[1-9][0-9]*)"
_COMPUTE_FORM = re.compile(f"{_NUMBER}([FBIWR]){_NUMBER}")
_MESSAGE_FORM = re.compile(f"{_NUMBER}(?:(SEND)_([FBRS]){_NUMBER}>{_NUMBER}|(RECV)_([FBRS]){_NUMBER}<{_NUMBER})")
_WINDOW_FORM = re.compile(f"{_NUMBER}(REDUCE|STEP)(?::([1-9][0-9]*))?(?:@([1-9][0-9]*))?")
_MOVE_FORM = re.compile(f"{_NUMBER}(?:(OUT){_NUMBER}>{_NUMBER}|(IN){_NUMBER}<{_NUMBER})")
_FILL_FORM = re.compile(f"{_NUMBER}({FILL_NAME.pattern}){_NUMBER}?(?:@([1-9][0-9]*))?")


class Action(NamedTuple):
    """One entry of a rank's list.

    Args:
        op: what to do.
        stage: the stage on this rank. A SEND of an activation carries this stage's output, and a RECV of an activation
            or of an input carries its input. A SEND of a gradient carries the gradient of its input, and a RECV of a
            gradient carries that of its output. A SEND of an input names the stage before, whose output is sent. A
            message with a stash names the stage that the stash belongs to, on every rank.
        microbatch: number of the micro-batch, over the whole stream; None for REDUCE, STEP and fills of a stage.
        payload: content of the message, for SEND and RECV; otherwise None.
        peer: for SEND and RECV, the pipeline rank on the other side; for OUT and IN, the rank that keeps the tensors
            meanwhile; otherwise None.
        window: for REDUCE and STEP, the optimizer step of the stream, from 0. For a fill, the window in which it is
            done, which may be later than its micro-batch's. Otherwise 0, because the micro-batch decides the window.
        row: for REDUCE and STEP, the first row of ``Schedule.rows`` that gives the stage to this rank; otherwise 0. It
            distinguishes the copies of a stage if several ranks of one replica hold one.
        fill: for FILL, the name of its :class:`~runner.schedule.fills.FillKind`; otherwise None.
    """

    op: Op
    stage: int
    microbatch: int | None = None
    payload: Payload | None = None
    peer: int | None = None
    window: int = 0
    row: int = 0
    fill: str | None = None

    @property
    def work(self) -> str:
        """The kind of a fill, otherwise the op; costs and colours are looked up by this name."""
        return self.fill or self.op

    def __str__(self) -> str:
        """The action in short: ``2F0`` is the forward of stage 2 and micro-batch 0.

        The other forms are ``2SEND_F0>3``, ``2RECV_B0<3``, ``3REDUCE``, ``3STEP`` (``3STEP:1@2`` in row 1 and window
        2), ``0OUT3>4`` and ``0IN3<4``. A fill prints its kind: ``2SUM0`` for a micro-batch, ``2SOLVE`` for a stage,
        ``2SOLVE@1`` in window 1.
        """
        if self.peer is not None:
            arrow = ">" if self.op in (Op.SEND, Op.OUT) else "<"
            payload = "" if self.payload is None else f"_{self.payload}"
            return f"{self.stage}{self.op}{payload}{self.microbatch}{arrow}{self.peer}"
        window = f"@{self.window}" if self.window else ""
        if self.microbatch is not None:
            return f"{self.stage}{self.work}{self.microbatch}{window}"
        row = f":{self.row}" if self.row else ""
        return f"{self.stage}{self.work}{row}{window}"


def shifted(action: Action, by: int) -> Action:
    """``action`` for the micro-batch that comes ``by`` micro-batches later."""
    assert action.microbatch is not None  # every compute action and message has one
    return action._replace(microbatch=action.microbatch + by)


def parse_action(text: str) -> Action:
    """Read an action from its text; this is the exact inverse of ``str(action)``.

    Raises:
        ValueError: no action has this text.
    """
    if found := _COMPUTE_FORM.fullmatch(text):
        stage, op, microbatch = found.groups()
        return Action(Op(op), int(stage), int(microbatch))
    if found := _MESSAGE_FORM.fullmatch(text):
        stage, op, payload, microbatch, peer = (group for group in found.groups() if group is not None)
        return Action(Op(op), int(stage), int(microbatch), Payload(payload), int(peer))
    if found := _MOVE_FORM.fullmatch(text):
        stage, op, microbatch, peer = (group for group in found.groups() if group is not None)
        return Action(Op(op), int(stage), int(microbatch), peer=int(peer))
    if found := _WINDOW_FORM.fullmatch(text):
        stage, op, copy, window = found.groups()
        return Action(Op(op), int(stage), window=int(window or 0), row=int(copy or 0))
    if found := _FILL_FORM.fullmatch(text):
        stage, kind, number, window = found.groups()
        microbatch = None if number is None else int(number)
        return Action(Op.FILL, int(stage), microbatch, window=int(window or 0), fill=kind)
    forms = "2F0, 2SEND_F0>3, 2RECV_B0<3, 3REDUCE, 3STEP, 0OUT3>4, 0IN3<4, and 2SUM0 or 2SOLVE for work in bubbles"
    raise ValueError(f"{text!r} is no action; the forms are {forms}")


@dataclass(frozen=True)
class Schedule(Remembering):
    """The actions of each rank, in order, and the placement of the stages.

    Args:
        name: name of the generator.
        placement: one row for each pipeline: stage -> pipeline rank.
        pipeline_of_microbatch: micro-batch -> row of ``placement``.
        actions: for each pipeline rank, compute actions and moves in the order of execution.
        chunks: number of model chunks per rank and pipeline.
        window_of_microbatch: micro-batch -> optimizer step of the stream; empty means that all micro-batches belong to
            window 0.
        backward: whether there are backwards; False for validation.
        backward_placement: stage -> pipeline rank of R and the backwards; empty means that they run where the forwards
            run. Every stage whose two ranks differ is recomputed.
        ahead: 0 means that ranks keep their order. Otherwise a rank takes its next forward instead of a backward whose
            gradient is late, as long as it holds fewer than ``ahead`` micro-batches between F and B; see
            :mod:`runner.schedule.simulation.opportunistic`.
        lags: for each stage, a number of micro-batches: the forward of micro-batch m reads the newest weights that the
            micro-batches before m - lag have made. This is version max(0, (m - lag) // T), where T is the number of
            micro-batches of an optimizer step, and version v is the result of v optimizer steps. Empty means that every
            window waits for the step before it. Otherwise windows overlap, and each stage is updated by itself as soon
            as its gradients are complete.
        reads_newest: whether backwards read the weights that are the newest when they run, not those of their forward.
        own_weights: whether each pipeline trains weights of its own, so that a rank holds its stage once for each
            pipeline, and once more as the average that draws them together after every optimizer step.
        wave: number of optimizer steps after which replicas exchange what their steps have changed; 0 means that they
            sum the gradients of every step.
        distance: number of waves by which a replica may lack the changes of other replicas.
        joined: number of neighbouring micro-batches that share one forward. It begins when all of their inputs are
            there, and hands on all of its outputs together. Each micro-batch has its own backward.
        parts: number of neighbouring micro-batches that are parts of one requested micro-batch.
        filling: the work that its fills do; None if it has no fills.
        sizes: for each micro-batch of a window its part of the window's samples, in any unit; empty means that all have
            as many.
    """

    name: str
    placement: tuple[tuple[int, ...], ...]
    pipeline_of_microbatch: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    chunks: int = 1
    window_of_microbatch: tuple[int, ...] = ()
    backward: bool = True
    backward_placement: tuple[int, ...] = ()
    lags: tuple[int, ...] = ()
    reads_newest: bool = False
    own_weights: bool = False
    wave: int = 0
    distance: int = 0
    joined: int = 1
    parts: int = 1
    ahead: int = 0
    filling: Filling | None = None
    sizes: tuple[float, ...] = field(default=(), repr=False)

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """The number of stages of one pipeline."""
        return len(self.placement[0])

    @property
    def microbatches(self) -> int:
        """The number of micro-batches of the whole stream, over all pipelines."""
        return len(self.pipeline_of_microbatch)

    @property
    def windows(self) -> int:
        """The number of optimizer steps of the stream."""
        return max(self.window_of_microbatch, default=0) + 1

    @property
    def is_asynchronous(self) -> bool:
        """Whether windows overlap, so that some forwards read weights without the updates of all earlier windows."""
        return bool(self.lags)

    @property
    def interval(self) -> int:
        """The number of optimizer steps after which the stream repeats itself."""
        return 1 if self.is_asynchronous else self.windows

    @property
    def window_size(self) -> int:
        """The number of micro-batches of one optimizer step."""
        return self.microbatches // self.windows

    @property
    def largest_size(self) -> float:
        """The size of the largest micro-batch, in units of the mean size."""
        return max(self.sizes) * len(self.sizes) / sum(self.sizes) if self.sizes else 1.0

    def size_of(self, microbatch: int | None) -> float:
        """The size of a micro-batch, in units of the mean size; 1 for what belongs to none."""
        if not self.sizes or microbatch is None:
            return 1.0
        return self.sizes[microbatch % len(self.sizes)] * len(self.sizes) / sum(self.sizes)

    def part_of_largest(self, microbatch: int | None) -> float:
        """The size of a micro-batch, in units of the largest."""
        if not self.sizes or microbatch is None:
            return 1.0
        return self.sizes[microbatch % len(self.sizes)] / max(self.sizes)

    def version_read(self, stage: int, microbatch: int, op: Op = Op.F) -> int:
        """The version of the weights of ``stage`` that ``op`` of a micro-batch reads."""
        if not self.lags or (self.reads_newest and op in BACKWARDS):
            return self.window_of(microbatch)
        return max(0, (microbatch - self.lags[stage]) // self.window_size)

    def older_versions(self, stage: int) -> int:
        """How many copies of a stage's weights besides the newest are kept, because actions will still read them.

        They are older versions, or the weights of each pipeline besides their average.
        """
        if self.own_weights:
            return len(self.placement)
        return 0 if not self.lags or self.reads_newest else -(-self.lags[stage] // self.window_size)

    @property
    def trained_copies(self) -> int:
        """How many copies of a stage's weights a rank trains: one for each pipeline that has weights of its own."""
        return len(self.placement) if self.own_weights else 1

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """All rows stage -> pipeline rank: one for each pipeline, and one for backwards that are on other ranks."""
        return (*self.placement, self.backward_placement) if self.backward_placement else self.placement

    @property
    def compute(self) -> tuple[tuple[Action, ...], ...]:
        """Each rank's list without its moves."""
        if not self.moves:
            return self.actions
        return tuple(tuple(action for action in row if action.op not in MOVES) for row in self.actions)

    def rank_of(self, stage: int, microbatch: int, op: Op = Op.F) -> int:
        """The pipeline rank that runs ``op`` of ``stage`` and ``microbatch``."""
        if self.backward_placement and op is not Op.F:
            return self.backward_placement[stage]
        return self.placement[self.pipeline_of_microbatch[microbatch]][stage]

    def has_other_backward(self, stage: int) -> bool:
        """Whether the backward of a stage is on another rank than its forward."""
        return bool(self.backward_placement) and self.backward_placement[stage] != self.placement[0][stage]

    def joined_with(self, microbatch: int) -> range:
        """The micro-batches that share one forward with ``microbatch``, including itself."""
        first = microbatch - microbatch % self.joined
        return range(first, first + self.joined)

    def window_of(self, microbatch: int) -> int:
        """The optimizer step that ``microbatch`` belongs to."""
        return self.window_of_microbatch[microbatch] if self.window_of_microbatch else 0

    def window_at(self, action: Action) -> int:
        """The optimizer step in which ``action`` is done."""
        if action.microbatch is None or action.op is Op.FILL:
            return action.window
        return self.window_of(action.microbatch)

    def fills_of(self, kind: str | None, stage: int) -> tuple[Action, ...]:
        """The fills of one kind, by its name, and one stage, in the order in which their rank does them."""
        return self._fills.get((kind, stage), ())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds in any pipeline, ascending, each once."""
        return tuple(sorted({stage for row in self.rows for stage, owner in enumerate(row) if owner == rank}))

    def copies_of(self, stage: int) -> tuple[int, ...]:
        """For each rank that holds ``stage``, the first row of ``rows`` that gives it to that rank."""
        return self._copies[stage]

    def copy_on(self, rank: int, stage: int) -> int:
        """The first row of ``rows`` that gives ``stage`` to ``rank``."""
        return next(row for row in self._copies[stage] if self.rows[row][stage] == rank)

    def is_split(self, stage: int, microbatch: int) -> bool:
        """Whether this backward is split into I and W."""
        return (stage, microbatch) in self._split

    def is_recomputed(self, stage: int, microbatch: int) -> bool:
        """Whether this forward is recomputed before its backward."""
        return (stage, microbatch) in self._recomputed

    def host_of(self, stage: int, microbatch: int) -> int | None:
        """The rank that keeps the tensors for this backward for a while; None if they stay on their own rank."""
        return self._hosts.get((stage, microbatch))

    def microbatches_of_window(self, window: int) -> tuple[int, ...]:
        """The micro-batches of one optimizer step, ascending."""
        return self._by_window.get(window, ())

    @property
    def sums_in_order(self) -> bool:
        """Whether every stage adds the gradients of its weights in the order of the micro-batches, as one process does.

        With several pipelines of the same weights this is never so, because each pipeline first adds those of its own
        micro-batches.
        """
        if len(self.placement) > 1 and not self.own_weights:
            return False
        added: dict[tuple[int, int], int] = {}  # pipeline, stage -> the last micro-batch that was added
        for row in self.actions:
            for action in row:
                if action.op in (Op.B, Op.W) and action.microbatch is not None:
                    place = self.pipeline_of_microbatch[action.microbatch], action.stage
                    if added.get(place, -1) > action.microbatch:
                        return False
                    added[place] = action.microbatch
        return True

    @cached_property
    def _copies(self) -> tuple[tuple[int, ...], ...]:
        first: list[dict[int, int]] = [{} for _ in range(self.stages)]  # per stage: rank -> row
        for row, owners in enumerate(self.rows):
            for stage, rank in enumerate(owners):
                first[stage].setdefault(rank, row)
        return tuple(tuple(rows.values()) for rows in first)

    @cached_property
    def moves(self) -> tuple[Action, ...]:
        """All IN actions, by which tensors come back that another rank has kept for a while."""
        return tuple(action for row in self.actions for action in row if action.op is Op.IN)

    @cached_property
    def _hosts(self) -> dict[tuple[int, int | None], int]:
        return {(move.stage, move.microbatch): move.peer for move in self.moves if move.peer is not None}

    @cached_property
    def _fills(self) -> dict[tuple[str | None, int], tuple[Action, ...]]:
        found: dict[tuple[str | None, int], tuple[Action, ...]] = {}
        for row in self.actions:
            for action in row:
                if action.op is Op.FILL:
                    key = action.fill, action.stage
                    found[key] = (*found.get(key, ()), action)
        return found

    @cached_property
    def _split(self) -> frozenset[tuple[int, int | None]]:
        return self._cells(Op.I)

    @cached_property
    def _recomputed(self) -> frozenset[tuple[int, int | None]]:
        return self._cells(Op.R)

    @cached_property
    def _by_window(self) -> dict[int, tuple[int, ...]]:
        windows: dict[int, list[int]] = {}
        for microbatch in range(self.microbatches):
            windows.setdefault(self.window_of(microbatch), []).append(microbatch)
        return {window: tuple(members) for window, members in windows.items()}

    def _cells(self, op: Op) -> frozenset[tuple[int, int | None]]:
        return frozenset((a.stage, a.microbatch) for row in self.actions for a in row if a.op is op)


@dataclass(frozen=True)
class Program(Remembering):
    """A schedule with its messages, reductions and optimizer steps.

    Args:
        schedule: the schedule that was lowered.
        actions: for each pipeline rank, all of its actions, in order.
        order: one global order of ``(rank, action)``. The list of every rank is a sub-sequence of it, and the SEND and
            RECV of a message are next to each other in it.
    """

    schedule: Schedule
    actions: tuple[tuple[Action, ...], ...]
    order: tuple[tuple[int, Action], ...]

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.actions)

    def of_window(self, rank: int, window: int) -> tuple[Action, ...]:
        """The actions of a rank in one optimizer step of the stream; its micro-batches are numbered from 0.

        A fill keeps the number that its micro-batch had in its own step.
        """
        schedule = self.schedule
        first = schedule.microbatches_of_window(window)[0]
        actions = [action for action in self.actions[rank] if schedule.window_at(action) == window]
        return tuple(a if a.op is Op.FILL or a.microbatch is None else shifted(a, -first) for a in actions)
