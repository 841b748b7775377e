"""What the schedule says is alive after every action is what the engine's buffers hold then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of
from torch import Tensor, nn
from torch.nn import functional

from runner.engine.engine import Engine
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.window import Window
from runner.model.boundary import flatten
from runner.schedule.catalogue.registry import build
from runner.schedule.liveness import Kind, Lifetime, lifetimes
from runner.schedule.lowering.program import lower
from runner.schedule.values import Action, Op, Program, Schedule

sgd = partial(torch.optim.SGD, lr=1e-2)
Alive = frozenset[tuple[Kind, int, int]]
"""Kind, stage and micro-batch of everything that is there."""

SAME_KIND = {
    "weight_gradients": Kind.DEFERRED,
    "gradient": Kind.OUTPUT_GRADIENT,
    "input_gradient": Kind.INPUT_GRADIENT,
    "hosted": Kind.STASH,
}
COMPARED = {Kind.SAVED, Kind.OUTPUT, Kind.INPUT, *SAME_KIND.values()}  # not what the transport owns, nor weights

CASES: dict[str, dict[str, Any]] = {
    "gpipe": {"ranks": 3, "microbatches": 4},
    "1f1b": {"ranks": 4, "microbatches": 6},
    "zb_h1": {"ranks": 4, "microbatches": 6},
    "zb_v": {"ranks": 3, "microbatches": 6},
    "interleaved_1f1b": {"ranks": 2, "microbatches": 4, "chunks": 2},
    "chimera": {"ranks": 4, "microbatches": 8},
    "bpipe": {"ranks": 6, "microbatches": 8},
    "varuna": {"ranks": 3, "microbatches": 5},
    "pipefb": {"ranks": 4, "microbatches": 6},
}


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(12)))


@pytest.mark.parametrize("name", CASES)
def test_the_buffers_hold_what_is_said_to_live(name: str) -> None:
    schedule = build(name, **CASES[name])
    program = lower(schedule)
    samples = 2 * schedule.microbatches
    batch = torch.randn(samples, 6), torch.randn(samples, 6)
    models = [make_model() for _ in range(schedule.ranks)]

    def run(transport: ThreadTransport) -> list[tuple[Action, Alive]]:
        layout = {"schedule": schedule, "pipeline": schedule.ranks, "data": 1, "count": schedule.microbatches}
        engine = make_engine(models[transport.rank], functional.mse_loss, transport, **layout, optimizer=sgd)  # type: ignore[arg-type]
        seen = watched(engine, schedule)
        engine.submit(part_of(batch, transport, schedule.ranks, 1, schedule))
        engine.drain()
        return seen

    compared = 0
    for rank, seen in enumerate(run_ranks(schedule.ranks, run)):
        assert sorted(action for action, _ in seen if action.op in (Op.F, Op.B, Op.I)) == sorted(
            action for action in program.actions[rank] if action.op in (Op.F, Op.B, Op.I)
        )
        expected: set[tuple[Kind, int, int]] = set()
        replayed = Replay(program, rank)
        for action, held in seen:
            expected = replayed.after(action)
            assert held == expected, f"rank {rank} after {action}"
            compared += len(held)
        assert not expected, "nothing is left"
    assert compared > 10 * schedule.ranks


class Replay:
    """What lives on a rank, by its lifetimes, action by action."""

    def __init__(self, program: Program, rank: int) -> None:
        self._begins: dict[Action | None, list[Lifetime]] = defaultdict(list)
        self._ends: dict[Action | None, list[Lifetime]] = defaultdict(list)
        for each in lifetimes(program)[rank]:
            if each.kind in COMPARED:
                self._begins[each.begins].append(each)
                self._ends[each.ends].append(each)
        self._alive: list[Lifetime] = []

    def after(self, action: Action) -> set[tuple[Kind, int, int]]:
        self._alive += self._begins[action]
        for each in self._ends[action]:
            self._alive.remove(each)
        places = [(each.kind, each.stage, each.microbatch or 0) for each in self._alive]
        assert len(places) == len(set(places)), "each is there once"
        return set(places)


def watched(engine: Engine, schedule: Schedule) -> list[tuple[Action, Alive]]:
    """Every action of the engine's executor in the order of execution, receives when they are posted, and what its
    buffers hold after it."""
    executor = engine._executor
    seen: list[tuple[Action, Alive]] = []

    def logged(handler: Callable[[Window, Action], None]) -> Callable[[Window, Action], None]:
        def call(window: Window, action: Action) -> None:
            handler(window, action)
            seen.append((action, held_by(executor._rank.buffers._held, schedule, engine.view.position)))

        return call

    for op in (Op.F, Op.B, Op.I, Op.W, Op.R, Op.SEND):
        executor._handlers[op] = logged(executor._handlers[op])
    receive = logged(executor._messages.receive)
    executor._handlers[Op.RECV] = receive
    vars(executor._messages)["receive"] = receive  # which is posted ahead of its turn, too
    return seen


def held_by(buffers: dict[tuple[str, int, int], Any], schedule: Schedule, rank: int) -> Alive:
    """The engine's buffers in the words of the schedule."""
    alive = {(SAME_KIND[kind], stage, number) for kind, stage, number in buffers if kind in SAME_KIND}
    for kind, stage, number in buffers:
        place = stage, number
        if kind == "sent" and schedule.is_recomputed(*place):
            alive.add((Kind.OUTPUT, *place))  # the message is the output
        if kind == "input" and has_own_memory(schedule, rank, *place):
            alive.add((Kind.INPUT, *place))
        if kind == "graph":
            _, output = buffers["graph", *place]
            (tensor,) = flatten(output)[0]
            away = not tensor.numel() and ("returned", *place) not in buffers
            if not away:
                alive.add((Kind.OUTPUT if is_leaf(tensor) else Kind.SAVED, *place))
            if not away and has_own_memory(schedule, rank, *place):
                alive.add((Kind.INPUT, *place))
    return frozenset(alive)


def is_leaf(tensor: Tensor) -> bool:
    """Whether no graph has made it: a forward that is recomputed keeps such an output."""
    return tensor.grad_fn is None


def has_own_memory(schedule: Schedule, rank: int, stage: int, microbatch: int) -> bool:
    """Whether a stage's input is not the batch's, nor an output that the stage before keeps on the same rank."""
    if stage == 0:
        return False
    return schedule.has_other_backward(stage - 1) or schedule.rank_of(stage - 1, microbatch) != rank
