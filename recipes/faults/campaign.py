"""Drives one chain: starts its run, watches what becomes of each fault, resumes, and compares what comes out."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.recipes.faults import layouts, oracles
from runner.recipes.faults.commands import fork_command
from runner.recipes.faults.damage import damage
from runner.recipes.faults.inside import Orders
from runner.recipes.faults.judge import Ended, complaints
from runner.recipes.faults.kinds import KINDS, Kind
from runner.recipes.faults.shadow import Shadow
from runner.recipes.faults.state import State
from runner.recipes.faults.values import Chain, Fault

__all__ = ["Result", "Settings", "run_chain", "run_unbroken", "unbroken_dir"]

_POLL_SECONDS = 0.02
_START_SECONDS = 40.0  # for a command without faults
_STEADY_SECONDS = 3.0  # for what was killed to end
_STOP_SECONDS = 1.0
_SECOND_SIGNAL_SECONDS = (0.0, 0.2, 1.0)
_SPARE_COMMANDS = 3  # more than faults in a chain; then a run is said not to come to its end


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a campaign.

    Args:
        out: its folder.
        patience: factor on all limits of time.
        broken: the mechanism that is switched off, or empty.
        keep: whether the folders of chains without findings are kept, too.
        deadline: the seconds after which a command has not ended in time; by default a start without faults and what
            the answers to its faults allow.
    """

    out: Path
    patience: float = 1.0
    broken: str = ""
    keep: bool = False
    deadline: float | None = None


@dataclass
class Result:
    """What came of a chain.

    Attributes:
        chain: its faults.
        happened: how many of them were injected; the run was complete before the others.
        seconds: of each command, in order.
        findings: what is not as promised; each is a line, after which number of faults it was seen, and which.
    """

    chain: Chain
    happened: int = 0
    seconds: list[float] = field(default_factory=list)
    findings: list[tuple[int, str]] = field(default_factory=list)

    def to_json(self) -> str:
        values = {"happened": self.happened, "seconds": self.seconds, "findings": self.findings}
        return json.dumps({"chain": json.loads(self.chain.to_json()), **values})

    @classmethod
    def from_json(cls, text: str) -> Result:
        values = json.loads(text)
        chain = Chain.from_json(json.dumps(values.pop("chain")))
        return cls(chain, **values | {"findings": [(number, line) for number, line in values["findings"]]})

    @property
    def failed(self) -> list[Fault]:
        """The faults at which something was found."""
        return [self.chain.faults[number - 1] for number in sorted({max(1, number) for number, _ in self.findings})]


def unbroken_dir(settings: Settings, layout: str, form: str) -> Path:
    """The directory of the run that met no fault."""
    return settings.out / "unbroken" / f"{layout} {form}".replace(" ", "_") / "run"


def run_unbroken(layout: str, form: str, settings: Settings) -> list[str]:
    """Run without a fault, unless that was done; return why it failed, if it did."""
    run_dir = unbroken_dir(settings, layout, form)
    if oracles.record_of(run_dir).get("status") == "ok":
        return []
    shutil.rmtree(run_dir.parent, ignore_errors=True)
    driver = _Driver(Chain(-1, layout, form, False, ()), run_dir.parent, settings)
    driver.drive()
    return [line for _, line in driver.result.findings]


def run_chain(chain: Chain, settings: Settings) -> Iterator[Result]:
    """Let runs meet the faults of a chain: one run, and another one for what is left where a fault was not reached."""
    left: Chain | None = chain
    while left is not None:
        result = _run(left, settings)
        result.chain, left = left.split(result.happened)
        yield result


def _run(chain: Chain, settings: Settings) -> Result:
    folder = settings.out / "chains" / chain.name
    shutil.rmtree(folder, ignore_errors=True)
    driver = _Driver(chain, folder, settings)
    if driver.drive():
        unbroken = unbroken_dir(settings, chain.layout, chain.form)
        driver.find(_in_child(lambda: [*oracles.differences(unbroken, driver.run_dir, logs=not driver.loses_power)]))
        driver.find(f"{name} was left behind" for name in oracles.leftovers(driver.run_dir))
    if not driver.result.findings and not settings.keep:
        shutil.rmtree(folder)
    return driver.result


class _Driver:
    """One run, to its end."""

    def __init__(self, chain: Chain, folder: Path, settings: Settings) -> None:
        folder.mkdir(parents=True)
        self._chain, self._folder, self._settings = chain, folder, settings
        self._kinds = [KINDS[fault.kind] for fault in chain.faults]
        self.run_dir = folder / "run"
        self.result = Result(chain)
        self._state = State(folder / "state")
        self.loses_power = any(kind.damage == "power loss" for kind in self._kinds)
        self._shadow = Shadow(folder / "shadow", self.run_dir) if self.loses_power else None
        self._orders = self._write_orders("orders.json", chain.faults)
        self._acknowledged = 0  # the newest step whose save was reported before the present command
        self._chance = random.Random(chain.number)

    def find(self, lines: Iterable[str]) -> None:
        self.result.findings += [(self.result.happened, line) for line in lines]

    def drive(self) -> bool:
        """Start the run again and again; return whether it came to its end."""
        for attempt in range(len(self._kinds) + _SPARE_COMMANDS):
            if self._command(attempt) == 0:
                return True
        self.find(["the run does not come to its end"])
        return False

    def _command(self, attempt: int) -> int | None:
        """One command and what follows it; its exit status, None if it had to be killed."""
        before, begun = self.result.happened, time.monotonic()
        output = self._folder / f"output-{attempt}.txt"
        pid = fork_command(self._words(), self._orders, self._folder, output)
        status = self._watch(pid, before, begun)
        self.result.seconds.append(time.monotonic() - begun)
        self._state.errno = 0
        happened = self.result.happened = self._state.happened
        said = output.read_text(encoding="utf-8", errors="replace")
        ended = Ended(status, said, oracles.record_of(self.run_dir), self._acknowledged, restarts=self._chain.restarts)
        self.find(complaints(ended, self._chain.faults[before:happened]))
        self.find(self._left_behind())
        self._acknowledged = self._state.acknowledged(layouts.LAYOUTS[self._chain.layout].ranks)
        self._state.forget(self._acknowledged)  # a part of a save that no rank completes with one of another command
        if happened > before:
            self._damage(self._kinds[happened - 1])
        return status

    def _words(self) -> list[str]:
        restarts = [f"launcher.max_restarts={len(self._kinds)}"] if self._chain.restarts else []
        words = layouts.overrides(self._chain.layout, self._chain.form, self._settings.patience)
        return ["train", *words, f"run_dir={self.run_dir}", "resume=auto", *restarts]

    def _write_orders(self, name: str, faults: Sequence[Fault]) -> Path:
        path = self._folder / name
        shadow = str(self._folder / "shadow") if self._shadow is not None else ""
        in_parts = self._chain.form == "in parts"
        run_dir, state = str(self.run_dir), str(self._folder / "state")
        made = Orders(tuple(faults), run_dir, state, shadow, in_parts, self._settings.broken, self._settings.patience)
        made.save(path)
        return path

    def _watch(self, pid: int, before: int, begun: float) -> int | None:
        """Wait for a command, and do meanwhile what its faults ask for."""
        seen = before
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            while seen < self._state.happened:
                seen += 1
                self._meanwhile(seen, pid)
            if time.monotonic() - begun > self._limit(self._kinds[before:seen]):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None
            time.sleep(_POLL_SECONDS)

    def _limit(self, kinds: Sequence[Kind]) -> float:
        own = sum(kind.answer.seconds if kind.answer is not None else 5.0 for kind in kinds)
        seconds = self._settings.deadline if self._settings.deadline is not None else _START_SECONDS + own
        return seconds * self._settings.patience

    def _meanwhile(self, number: int, pid: int) -> None:
        """Do what belongs to a fault, by its number, while the command runs."""
        kind, fault = self._kinds[number - 1], self._chain.faults[number - 1]
        if kind.meanwhile == "continue":
            time.sleep(_STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._state.process_of(number), signal.SIGCONT)
        elif kind.meanwhile == "second signal":
            time.sleep(_SECOND_SIGNAL_SECONDS[fault.count % len(_SECOND_SIGNAL_SECONDS)])
            os.kill(pid, kind.second)
        elif kind.meanwhile == "second start":
            self._start_second()
            self._state.released = number

    def _start_second(self) -> None:
        """Another command in the same directory: it must be refused, and change nothing."""
        files = sorted(self.run_dir.rglob("*"))
        output = self._folder / "output-second.txt"
        output.unlink(missing_ok=True)
        pid = fork_command(self._words(), self._write_orders("none.json", ()), self._folder, output)
        limit = time.monotonic() + _START_SECONDS * self._settings.patience
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        status = os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
        if status != 2 or "must not be in use" not in output.read_text(encoding="utf-8", errors="replace"):
            self.find([f"a second command in the directory ended with status {status}"])
        gone = [path.name for path in files if path.suffix == ".ckpt" and not path.exists()]
        if gone and status != 2:
            self.find([f"a second command has removed {', '.join(gone)}"])

    def _left_behind(self) -> list[str]:
        """Processes that live longer than the command; they are ended."""
        end = time.monotonic() + _STEADY_SECONDS * self._settings.patience
        while (alive := oracles.living(self._folder)) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"{len(alive)} processes outlived the command"] if alive else []

    def _damage(self, kind: Kind) -> None:
        if kind.damage == "power loss" and self._shadow is not None:
            self._shadow.lose_power(self._chance if self._chance.random() < 0.5 else None)
        elif kind.damage is not None:
            kept = damage(self.run_dir, kind, self._chance)
            if kept is not None:  # the newest checkpoint is gone, as a part of the fault
                self._acknowledged = min(self._acknowledged, kept)
                self._state.forget(kept)


def _in_child(find: Callable[[], list[str]]) -> list[str]:
    """Call a function in a process of its own, so that this one stays as it is: commands are forked from it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lines = find()
        except Exception as error:
            lines = [f"it cannot be compared: {error!r}"]
        with os.fdopen(write, "w") as file:
            json.dump(lines, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read()
    os.waitpid(child, 0)
    return [re.sub(r"\s+", " ", line) for line in json.loads(said or '["the comparison died"]')]
