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
from runner.model.boundary import flatten
from runner.schedule.catalogue.registry import build
from runner.schedule.liveness import Kind, Lifetime, lifetimes, weight_lifetimes
from runner.schedule.lowering.program import lower
from runner.schedule.stream import repeat
from runner.schedule.values import Action, Op, Program, Schedule, shifted

sgd = partial(torch.optim.SGD, lr=1e-2)
Alive = frozenset[tuple[Kind, int, int]]
"""Kind, stage and micro-batch of everything that is there."""

Seen = tuple[Action, Alive, list[int]]
"""An action, and what is there after it; also the versions of weights, where the engine keeps several."""

SAME_KIND = {
    "weight_gradients": Kind.DEFERRED,
    "gradient": Kind.OUTPUT_GRADIENT,
    "input_gradient": Kind.INPUT_GRADIENT,
    "hosted": Kind.STASH,
}
COMPARED = {Kind.SAVED, Kind.OUTPUT, Kind.INPUT, *SAME_KIND.values()}  # not what the transport owns, nor weights

CASES: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize(("name", "options"), [*CASES.items(), ("pipefb", {"ranks": 2, "microbatches": 6})])
def test_the_buffers_hold_what_is_said_to_live(name: str, options: dict[str, Any]) -> None:
    schedule = build(name, **options)
    program = lower(schedule)
    compared = 0
    for rank, seen in enumerate(trained(schedule, windows=1)):
        compared += compare(program, rank, seen)
    assert compared > 10 * schedule.ranks


def test_where_windows_overlap_versions_of_weights_live_too() -> None:
    """The engine lets go of a version at the step after its last reader, at whose end both say the same."""
    windows = 5
    schedule = build("pipedream_2bw", ranks=3, microbatches=3)
    program = lower(repeat(schedule, windows))
    for rank, seen in enumerate(trained(schedule, windows)):
        seen = numbered_through(seen, microbatches=3)
        compare(program, rank, seen)
        replayed = Replay(program, rank)
        steps = [(action, held) for action, _, held in seen if action.op is Op.STEP]
        assert len(steps) == windows
        for action, held in steps[:-1]:  # after the last one no window comes for which one is kept
            assert replayed.versions_after(action) == set(held)


def numbered_through(seen: list[Seen], microbatches: int) -> list[Seen]:
    """Where windows overlap, the engine numbers them round and round; here they are numbered on."""
    round_of: dict[Action, int] = defaultdict(int)  # how often an action of this number has been done
    places = 1 + max(action.microbatch or 0 for action, *_ in seen)
    found = []
    for action, held, versions in seen:
        rounds, windows = round_of[action], places // microbatches
        round_of[action] += 1
        if action.microbatch is None:
            later = action._replace(window=action.window + rounds * windows)
        else:
            later = shifted(action, rounds * places)
        found.append((later, held, versions))
    return found


def trained(schedule: Schedule, windows: int) -> list[list[Seen]]:
    """What the engine of each rank has done, and held, in so many optimizer steps."""
    count = schedule.microbatches // schedule.windows
    models = [make_model() for _ in range(schedule.ranks)]
    batch = torch.randn(2 * count, 6), torch.randn(2 * count, 6)

    def run(transport: ThreadTransport) -> list[Seen]:
        model, order = models[transport.rank], {"schedule": schedule, "pipeline": schedule.ranks, "data": 1}
        engine = make_engine(model, functional.mse_loss, transport, **order, count=count, optimizer=sgd)  # type: ignore[arg-type]
        seen = watched(engine, schedule)
        for _ in range(windows):
            engine.submit(part_of(batch, transport, schedule.ranks, 1, schedule))
        engine.drain()
        return seen

    return run_ranks(schedule.ranks, run)


def compare(program: Program, rank: int, seen: list[Seen]) -> int:
    """Compare what a rank held with what is said to live; how many things these were."""
    replayed, compared = Replay(program, rank), 0
    numbers = 1 + max(number for _, held, _ in seen for *_, number in held)  # which may begin again
    expected: set[tuple[Kind, int, int]] = set()
    for action, held, _ in seen:
        expected = {(kind, stage, number % numbers) for kind, stage, number in replayed.after(action)}
        assert held == expected, f"rank {rank} after {action}"
        compared += len(held)
    assert not expected, "nothing is left"
    done = {action for action, *_ in seen}
    assert {action for action in program.actions[rank] if action.op is not Op.REDUCE} == done
    return compared


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
        self._versions = weight_lifetimes(program)[rank]
        self._position = {action: index for index, action in enumerate(program.actions[rank])}

    def after(self, action: Action) -> set[tuple[Kind, int, int]]:
        self._alive += self._begins[action]
        for each in self._ends[action]:
            self._alive.remove(each)
        places = [(each.kind, each.stage, each.microbatch or 0) for each in self._alive]
        assert len(places) == len(set(places)), "each is there once"
        return set(places)

    def versions_after(self, action: Action) -> set[int]:
        """The versions of the rank's weights that are there when an action has ended."""
        now = self._position[action]
        begun = [each for each in self._versions if each.begins is None or self._position[each.begins] <= now]
        return {each.version for each in begun if each.ends is None or self._position[each.ends] > now}


def watched(engine: Engine, schedule: Schedule) -> list[Seen]:
    """Every action of the engine's executor in the order of execution, receives when they are posted."""
    executor = engine._executor
    seen: list[Seen] = []

    def logged(handler: Callable[[Action], None]) -> Callable[[Action], None]:
        def call(action: Action) -> None:
            handler(action)
            versions = [version for store in engine.stores.values() for version in store.versions]
            seen.append((action, held_by(executor._rank.buffers._held, schedule, engine.view.position), versions))

        return call

    for op in (Op.F, Op.B, Op.I, Op.W, Op.R, Op.SEND, Op.STEP):
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
