"""Injects faults in the processes of a run: wraps functions from outside, so that the runner has no hook for it.

It is the entry that every rank calls in place of the runner's own, which it calls in turn. A process that finds
:data:`FAULTS_VARIABLE` in its environment when it imports this module, or that is told to :func:`install`, wraps the
functions of :mod:`runner.recipes.faults.places`. A fault is injected once, in whichever start of the process it is
reached.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch.trainer.call as hooks
import torch.utils.data

from runner.config import schema
from runner.config.schema import RunConfig
from runner.engine.executor import Executor
from runner.launch.processes import overdue
from runner.recipes.faults.acts import Here
from runner.recipes.faults.calls import Calls
from runner.recipes.faults.kinds import KINDS
from runner.recipes.faults.places import PLACES
from runner.recipes.faults.shadow import Shadow
from runner.recipes.faults.state import State
from runner.recipes.faults.values import Fault
from runner.training.run import run_rank as run_rank_of_runner

__all__ = ["BROKEN", "ENTRY", "FAULTS_VARIABLE", "Orders", "install", "put_in", "run_rank"]

FAULTS_VARIABLE = "RUNNER_FAULTS"
"""The environment variable that names the file with the :class:`Orders`."""
ENTRY = f"{__name__}:run_rank"
BROKEN = ("directory sync", "lock", "heartbeat")
"""The mechanisms of the runner that can be switched off, to see whether the campaign finds that."""
_MARGIN_SECONDS = 2.0  # in place of WATCHDOG_MARGIN_SECONDS, so that hangs are ended soon


@dataclass(frozen=True, slots=True)
class Orders:
    """What the processes of a run are told.

    Args:
        faults: what to inject, in this order.
        run_dir: the run's directory.
        state: the file that the processes share with the campaign.
        shadow: the folder of what is on the disk, see :mod:`runner.recipes.faults.shadow`; empty if nobody asks.
        in_parts: whether checkpoints are written in parts.
        broken: the mechanism that does not work, one of :data:`BROKEN`; or empty.
        patience: factor on limits of time.
    """

    faults: tuple[Fault, ...]
    run_dir: str
    state: str
    shadow: str
    in_parts: bool
    broken: str
    patience: float

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Orders:
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**values | {"faults": tuple(Fault(**each) for each in values["faults"])})


class Injector:
    """Injects a process's faults.

    Args:
        orders: for all processes.
        role: what this process is before it becomes a rank, ``command`` or ``template``.
    """

    executor: Any = None

    def __init__(self, orders: Orders, role: str) -> None:
        self._faults = orders.faults
        self.state = State(Path(orders.state))
        self._first_role = role
        self._lock = threading.Lock()
        self._number = self._count = 0

    @property
    def role(self) -> str:
        if torch.utils.data.get_worker_info() is not None:
            return "worker"
        return "rank" if "RANK" in os.environ else self._first_role

    def reached(self, place: str) -> None:
        """Inject the next fault if this is its place, and the time that it names."""
        number = self.state.happened
        if number >= len(self._faults) or place != self._faults[number].place or not self._is_meant(number):
            return
        fault = self._faults[number]
        with self._lock:
            if number != self._number:
                self._number, self._count = number, 0
            self._count += 1
            if self._count != fault.count:
                return
            self.state.happens(number + 1)
        KINDS[fault.kind].act(Here(number + 1, fault.count, self.state, self.executor))

    def _is_meant(self, number: int) -> bool:
        fault, role = self._faults[number], self.role
        if PLACES[fault.place].role != role:
            return False
        return role not in ("rank", "worker") or int(os.environ["RANK"]) == fault.rank


_installed: Injector | None = None


def install(role: str) -> None:
    """Wrap the functions of all places in this process and what it forks; once.

    Args:
        role: see :class:`Injector`.
    """
    global _installed
    if _installed is not None:
        _installed._first_role = role
        return
    orders = Orders.load(Path(os.environ[FAULTS_VARIABLE]))
    _installed = injector = Injector(orders, role)
    for place in PLACES.values():
        if place.target:
            _wrap(place.target, functools.partial(injector.reached, place.name))
    _wrap_hooks(injector)
    _wrap_actions(injector)
    shadow = Shadow(Path(orders.shadow), Path(orders.run_dir)) if orders.shadow else None
    Calls(injector, Path(orders.run_dir), shadow, syncs_directories=orders.broken != "directory sync").install()
    _acknowledge_saves(injector.state, in_parts=orders.in_parts)
    _break(orders.broken)
    for module in (schema, overdue):
        put_in(module, WATCHDOG_MARGIN_SECONDS=_MARGIN_SECONDS * orders.patience)


def put_in(owner: object, **replacements: object) -> None:
    """Replace names of a module or a class, for this process."""
    for name, value in replacements.items():
        setattr(owner, name, value)


def run_rank(config: RunConfig, run_dir: Path) -> bool:
    """The entry of every rank."""
    if _installed is not None:
        _installed.reached("phase rank")
    return run_rank_of_runner(config, run_dir)


def _wrap(target: str, before: Callable[[], None], after: Callable[..., None] | None = None) -> None:
    """Have ``before`` called before a function, and ``after`` with its arguments when it has returned.

    Args:
        target: ``module:name``, where the caller looks it up; a method is ``module:Class.name``.
    """
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*given: Any, **named: Any) -> Any:
        before()
        result = original(*given, **named)
        if after is not None:
            after(*given, **named)
        return result

    setattr(owner, name, wrapped)


def _wrap_hooks(injector: Injector) -> None:
    """Lightning calls all hooks of callbacks through one function, and that of saves through another one."""
    original = hooks._call_callback_hooks

    def call(trainer: Any, hook_name: str, *given: Any, **named: Any) -> None:
        injector.reached(f"hook {hook_name}")
        original(trainer, hook_name, *given, **named)

    put_in(hooks, _call_callback_hooks=call)
    saves = f"{hooks.__name__}:_call_callbacks_on_save_checkpoint"
    _wrap(saves, functools.partial(injector.reached, "hook on_save_checkpoint"))


def _wrap_actions(injector: Injector) -> None:
    """Every handler of the engine's table of actions."""
    make = Executor.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        injector.executor = self
        self._handlers = {op: _before(handler, injector, op.name) for op, handler in self._handlers.items()}

    put_in(Executor, __init__=init)


def _before(handler: Callable[[Any], None], injector: Injector, op: str) -> Callable[[Any], None]:
    def handle(action: Any) -> None:
        injector.reached(f"action {op}")
        handler(action)

    return handle


def _acknowledge_saves(state: State, *, in_parts: bool) -> None:
    """Note what has been saved when the function that saves it has returned."""

    def whole(trainer: Any, *_: Any, **__: Any) -> None:
        state.acknowledge(trainer.global_rank, trainer.global_step)

    def part(content: Any, directory: Path, rank: int, ranks: int) -> None:
        state.acknowledge(rank, int(directory.stem.rpartition("-")[2]))

    if in_parts:
        _wrap("runner.training.checkpoints:write_part", lambda: None, part)
    else:
        _wrap("lightning.pytorch.trainer.trainer:Trainer.save_checkpoint", lambda: None, whole)


def _break(mechanism: str) -> None:
    """Switch off what the runner relies on."""
    if mechanism == "lock":
        from runner.launch.run import lock

        put_in(lock, alone_in=lambda *_: nullcontext())
    if mechanism == "heartbeat":

        def never(self: overdue.Watch, alive: Sequence[int], now: float) -> list[int]:
            return []

        put_in(overdue.Watch, overdue=never)


if FAULTS_VARIABLE in os.environ:  # an executed process
    install("template")
