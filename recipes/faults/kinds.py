"""The kinds of faults: a table in which each says what it does, where it may come, and how a run must answer."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runner.recipes.faults import acts
from runner.recipes.faults.layouts import Layout
from runner.recipes.faults.places import Part, Place

__all__ = ["KINDS", "Answer", "Damage", "Kind", "Meanwhile"]

Meanwhile = Literal["second start", "continue", "second signal"]
"""What the campaign does while the process waits, or after it has gone on."""
Damage = Literal["power loss", "truncated", "flipped"]
"""What the campaign does to the files when the command has ended."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command must end at a fault that ends it.

    Args:
        exits: exit statuses; negative for a signal.
        told: what one of the messages, or the record's reason, must contain; any of these; none if empty.
        seconds: the longest time, beside what a run without faults takes.
    """

    exits: tuple[int, ...]
    told: tuple[str, ...] = ()
    seconds: float = 15.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Args:
        name: as a table shows it.
        says: what happens.
        act: does it.
        where: whether it may come at a place.
        answer: how the command ends; None if the run goes on as if nothing had happened.
        may_go_on: whether the run may also go on, because nothing that it needs was lost.
        meanwhile, second: what the campaign adds while the command runs; the second signal.
        damage, file: what the campaign does to the files when it has ended, and to which.
        suits: whether it may come in a layout.
    """

    name: str
    says: str
    act: acts.Act
    where: Callable[[Place], bool]
    answer: Answer | None = None
    may_go_on: bool = False
    meanwhile: Meanwhile | None = None
    second: int = 0
    damage: Damage | None = None
    file: str = ""
    suits: Callable[[Layout], bool] = lambda layout: True

    @property
    def is_restarted(self) -> bool:
        """Whether ``launcher.max_restarts`` helps: the ranks have failed, and the command lives."""
        return self.answer is not None and self.answer.exits == (1,) and not self.may_go_on


def _in_rank(place: Place) -> bool:
    return place.role == "rank"


def _in_user_code(place: Place) -> bool:
    """Where a user's function may be called."""
    return place.role == "rank" and (place.kind in ("action", "hook") or place.name in ("phase parts", "phase rank"))


def _in_steps(place: Place) -> bool:
    return place.role == "rank" and place.part is Part.STEPS and place.kind in ("action", "hook")


def _at_action(place: Place) -> bool:
    return place.kind == "action"


def _at_message(place: Place) -> bool:
    return place.name in ("action SEND", "action RECV", "action F", "action B")


def _at_call(place: Place) -> bool:
    return place.kind == "call"


def _at_write(place: Place) -> bool:
    return place.name.startswith(("call write", "call open", "call fsync"))


def _of_run(place: Place) -> bool:
    """In a rank or in the command, while the command has the directory."""
    return place.role in ("rank", "command") and place.name not in _BEFORE_LOCK


_BEFORE_LOCK = ("phase template", "phase plan", "phase directory", "call open of the command")


def _has_peers(layout: Layout) -> bool:
    return layout.ranks > 1


def _died(number: int, says: str, act: acts.Act, where: Callable[[Place], bool]) -> Kind:
    name = signal.Signals(number).name
    return Kind(f"{name} of a rank", says, act, where, Answer((1,), (f"died: {name}",)))


_NAMES = {each: each.name.removeprefix("SIG") for each in signal.Signals}
_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def _stopped(number: int, then: int = 0) -> Kind:
    """A signal to the command, alone or followed by another one.

    Of two, a busy machine may deliver both before the command acts on one, and it may name either.
    """
    names = [_NAMES[signal.Signals(each)] for each in (number, then) if each]
    exits = tuple(75 if each in _PREEMPTING else 130 for each in (number, then) if each)
    name = names[0]
    says = f"the command is told to stop by {name}"
    if then:
        says += f", and again by {names[1]}, up to a second later"
    return Kind(
        f"{' then '.join(names)} to the command",
        says,
        acts.signal_command(number),
        _of_run,
        Answer(exits, tuple(f"stopped by SIG{each}" for each in names)),
        may_go_on=True,
        meanwhile="second signal" if then else None,
        second=then,
    )


def _refused(name: str) -> Kind:
    number = getattr(errno, name)
    told = {"ENOSPC": "No space left", "EIO": "Input/output error", "EMFILE": "Too many open files"}
    words = (told.get(name, "Cannot allocate memory"),)
    says = f"a call on a file gets {name}, once"
    return Kind(f"{name} at a call", says, acts.error(number), _at_call, Answer((1, 2), words), may_go_on=True)


def _damaged(damage: Damage, file: str) -> Kind:
    says = f"the command is killed, and {file} is {'cut short' if damage == 'truncated' else 'changed by one bit'}"
    name = f"{file} {damage}"
    return Kind(name, says, acts.kill_command, _in_steps, Answer((-signal.SIGKILL,)), damage=damage, file=file)


_KILLED = Answer((-signal.SIGKILL,))
_STUCK = Answer(
    (1,), ("no progress", "took longer than", "timed out", "did not end", "did not reach", "sent no message"), 25.0
)

KINDS = {
    kind.name: kind
    for kind in (
        _died(signal.SIGKILL, "a rank is killed", acts.kill, _in_rank),
        _died(signal.SIGSEGV, "native code of a rank reads where no memory is", acts.crash, _in_user_code),
        _died(signal.SIGABRT, "native code of a rank aborts", acts.abort, _in_user_code),
        _died(signal.SIGINT, "a rank alone gets an interrupt", acts.signal_self(signal.SIGINT), _in_steps),
        _died(signal.SIGHUP, "a rank alone gets a hangup", acts.signal_self(signal.SIGHUP), _in_steps),
        Kind(
            "TERM to a rank",
            "a rank alone is told to stop by TERM",
            acts.signal_self(signal.SIGTERM),
            _in_steps,
            Answer((75,), ("stopped by SIGTERM",)),
            may_go_on=True,
        ),
        Kind("USR1 to a rank", "a rank alone gets USR1", acts.signal_self(signal.SIGUSR1), _in_rank),
        Kind("USR2 to a rank", "a rank alone gets USR2", acts.signal_self(signal.SIGUSR2), _in_rank),
        Kind(
            "SIGKILL of the command",
            "the command is killed",
            acts.kill_command,
            lambda place: place.role in ("rank", "command"),
            _KILLED,
        ),
        Kind("SIGKILL of the template", "it is killed", acts.kill, lambda place: place.role == "template"),
        Kind(
            "SIGKILL of a loader worker",
            "a worker of a data loader is killed",
            acts.kill,
            lambda place: place.role == "worker",
            Answer((1,), ("orker",)),
        ),
        *map(_stopped, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)),
        _stopped(signal.SIGTERM, signal.SIGTERM),
        _stopped(signal.SIGUSR1, signal.SIGTERM),
        _stopped(signal.SIGUSR2, signal.SIGUSR1),
        _stopped(signal.SIGINT, signal.SIGINT),
        _stopped(signal.SIGHUP, signal.SIGHUP),
        _stopped(signal.SIGHUP, signal.SIGTERM),
        Kind(
            "STOP, then CONT",
            "a rank stands still for a second",
            acts.signal_self(signal.SIGSTOP),
            _in_rank,
            meanwhile="continue",
        ),
        Kind("STOP for good", "a rank stands still", acts.signal_self(signal.SIGSTOP), _in_steps, _STUCK),
        Kind("exception", "a user's function raises", acts.fail, _in_user_code, Answer((1,), ("an injected error",))),
        Kind(
            "sys.exit(0)",
            "a user's function leaves by sys.exit(0)",
            acts.leave_politely,
            _in_user_code,
            Answer((1,), ("SystemExit", "before its work was complete")),
        ),
        Kind(
            "os._exit(0)",
            "a user's function leaves by os._exit(0)",
            acts.leave_at_once,
            _in_user_code,
            Answer((1,), ("ended with status 0 before its work was complete",)),
        ),
        Kind("hang", "a user's function does not return", acts.hang, _in_steps, _STUCK),
        Kind("hang with the lock", "nor releases the interpreter's lock", acts.hang_with_lock, _in_steps, _STUCK),
        *map(_refused, ("ENOSPC", "EIO", "EMFILE", "ENOMEM")),
        Kind(
            "disk stays full",
            "a call gets ENOSPC, and all later ones that need space",
            acts.full_disk,
            _at_write,
            Answer((1, 2), ("No space left",)),
            may_go_on=True,
        ),
        Kind(
            "short write",
            "half of the bytes are written, then ENOSPC",
            acts.short_write,
            lambda place: place.name.startswith("call write"),
            Answer((1, 2), ("No space left",)),
            may_go_on=True,
        ),
        Kind("clock jumps ahead", "the wall clock of a process is a day ahead", acts.turn_clock(1), _of_run),
        Kind("clock jumps back", "the wall clock of a process is a day behind", acts.turn_clock(-1), _of_run),
        Kind(
            "second start",
            "a second command starts in the directory",
            acts.wait_for_campaign,
            lambda place: _in_steps(place) or place.name == "phase poll",
            meanwhile="second start",
        ),
        Kind(
            "connections reset",
            "all connections of a rank are closed",
            acts.reset_connections,
            _at_action,
            Answer((1,), ("onnection", "losed", "reset", "eer", "roken pipe", "no progress"), 25.0),
            may_go_on=True,
            suits=_has_peers,
        ),
        Kind(
            "partition",
            "nothing that a rank sends arrives",
            acts.lose_messages,
            _at_message,
            _STUCK,
            may_go_on=True,
            suits=_has_peers,
        ),
        Kind(
            "weight flipped",
            "one bit of a weight changes in one of its copies",
            acts.flip_weight,
            _at_action,
            Answer((1,), ("differ",)),
            may_go_on=True,
            suits=lambda layout: layout.replicas,
        ),
        Kind(
            "power loss",
            "the machine loses power, and its files what was not synced",
            acts.kill_command,
            lambda place: place.role in ("rank", "command") and place.part is not Part.START,
            _KILLED,
            damage="power loss",
        ),
        *(_damaged("truncated", file) for file in ("checkpoint", "record.json", "steps.jsonl", "config.yaml")),
        *(_damaged("flipped", file) for file in ("checkpoint", "record.json", "steps.jsonl", "config.yaml")),
    )
}
"""All kinds by name."""
