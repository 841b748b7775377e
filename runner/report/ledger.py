"""The jobs of a sweep, by what they ask for: written before the first one starts, so that a sweep can be started again.

``sweep.json`` says which job has which number, and nothing of how it went: that is the job's record, so that the two
can never disagree, whenever the sweep is killed. While a sweep runs it holds ``sweep.lock``; the system lets go of it
with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.record import write_atomically

__all__ = ["LEDGER_FILE", "Job", "Ledger", "is_running", "running"]

LEDGER_FILE = "sweep.json"
_LOCK_FILE = "sweep.lock"


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a sweep.

    Args:
        number: names its directory.
        key: of what it asks for: equal for two requests that must give the same numbers.
        overrides: those that tell it from the sweep's other jobs.
    """

    number: int
    key: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ledger:
    """All jobs that were ever asked of a sweep's directory, by number."""

    jobs: tuple[Job, ...] = ()

    def entered(self, wanted: Sequence[tuple[str, Sequence[str]]]) -> tuple[Ledger, list[Job]]:
        """The ledger with every wanted job in it, and the job of each.

        Two wanted jobs may have one key, where they differ in nothing that changes a number: each has its own entry.

        Args:
            wanted: ``(key, overrides)`` of each.
        """
        jobs, free = list(self.jobs), list(self.jobs)
        found: list[Job] = []
        for key, overrides in wanted:
            same = [job for job in free if job.key == key]
            job = next((one for one in same if one.overrides == tuple(overrides)), same[0] if same else None)
            if job is None:
                job = Job(len(jobs), key, tuple(overrides))
                jobs.append(job)
            else:
                free.remove(job)
            found.append(job)
        return Ledger(tuple(jobs)), found

    def save(self, sweep_dir: Path) -> None:
        """Write it as a whole or not at all."""
        lines = ",\n  ".join(json.dumps(asdict(job)) for job in self.jobs)
        write_atomically(sweep_dir / LEDGER_FILE, f'{{"jobs": [\n  {lines}\n]}}\n')

    @classmethod
    def load(cls, sweep_dir: Path) -> Ledger:
        """What :meth:`save` wrote; empty where there is none. Raises ValueError where it is no ledger."""
        path = sweep_dir / LEDGER_FILE
        try:
            jobs = json.loads(path.read_text(encoding="utf-8"))["jobs"]
            return cls(tuple(Job(job["number"], job["key"], tuple(job["overrides"])) for job in jobs))
        except FileNotFoundError:
            return cls()
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not the ledger of a sweep: {error}") from error


@contextlib.contextmanager
def running(sweep_dir: Path) -> Iterator[bool]:
    """Whether this process has the sweep to itself, for as long as the block runs; False where another one runs it.

    Raises:
        OSError: the file system has no locks.
    """
    with (sweep_dir / _LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def is_running(sweep_dir: Path) -> bool:
    """Whether a process runs the sweep; also True where the file system cannot say."""
    if not (sweep_dir / _LOCK_FILE).exists():
        return False
    try:
        with running(sweep_dir) as free:
            return not free
    except OSError:
        return True
