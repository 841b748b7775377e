"""The ledger of a sweep: its jobs and what each asks for, written before the first job starts.

With it, a sweep can be started again. ``sweep.json`` says which job has which number, and nothing about how the job
went: that is in the job's record, so that the two cannot disagree whenever the sweep is killed. While a sweep runs, it
holds a lock on ``sweep.lock``; the system releases the lock when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.record import write_atomically

__all__ = ["LEDGER_FILE", "Job", "Ledger", "is_running", "running"]

LEDGER_FILE = "sweep.json"
_LOCK_FILE = "sweep.lock"
_WITHOUT_EFFECT = {  # keys that say where and how a sweep runs, not what its jobs are
    *("name", "run_dir", "resume", "sweep_retry", "sweep_on_failure", "sweep_most", "sweep_report", "sweep_without")
}


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a sweep.

    Args:
        number: the name of its directory.
        key: identifies what it asks for; equal for two requests that must give the same numbers.
        overrides: the overrides that distinguish it from the other jobs of its start.
        common: the overrides that all jobs of its start had; empty if it is not known.
    """

    number: int
    key: str
    overrides: tuple[str, ...]
    common: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ledger:
    """All jobs that were ever requested in a sweep's directory, by number."""

    jobs: tuple[Job, ...] = ()

    def entered(
        self, wanted: Sequence[tuple[str, Sequence[str]]], common: Sequence[str] = ()
    ) -> tuple[Ledger, list[Job]]:
        """Return the ledger with every wanted job in it, and the jobs in the order of ``wanted``.

        Two wanted jobs may have the same key if they differ in nothing that changes a result; each has its own entry.

        Args:
            wanted: ``(key, overrides)`` of each job.
            common: the overrides that all of them have.
        """
        jobs, free = list(self.jobs), list(self.jobs)
        found: list[Job] = []
        for key, overrides in wanted:
            same = [job for job in free if job.key == key]
            job = next((one for one in same if one.overrides == tuple(overrides)), same[0] if same else None)
            if job is None:
                job = Job(len(jobs), key, tuple(overrides), tuple(common))
                jobs.append(job)
            else:
                free.remove(job)
            found.append(job)
        return Ledger(tuple(jobs)), found

    def told(self) -> dict[int, list[str]]:
        """For each job's number, the overrides that distinguish it from all others, also from those of other starts."""
        known = [set(job.common) for job in self.jobs if job.common]
        shared = set.intersection(*known) if known else set()
        found = {}
        for job in self.jobs:
            named = {_key(one) for one in job.overrides} | _WITHOUT_EFFECT
            others = [one for one in job.common if one not in shared and _key(one) not in named]
            found[job.number] = [*job.overrides, *others]
        return found

    def save(self, sweep_dir: Path) -> None:
        """Write the ledger atomically."""
        lines = ",\n  ".join(json.dumps(asdict(job)) for job in self.jobs)
        write_atomically(sweep_dir / LEDGER_FILE, f'{{"jobs": [\n  {lines}\n]}}\n')

    @classmethod
    def load(cls, sweep_dir: Path) -> Ledger:
        """Read what :meth:`save` wrote; empty if there is no file. Raises ValueError if the file is not a ledger."""
        path = sweep_dir / LEDGER_FILE
        try:
            jobs = json.loads(path.read_text(encoding="utf-8"))["jobs"]
            return cls(tuple(_job(each) for each in jobs))
        except FileNotFoundError:
            return cls()
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not the ledger of a sweep: {error}") from error


def _job(entry: Mapping[str, Any]) -> Job:
    return Job(entry["number"], entry["key"], tuple(entry["overrides"]), tuple(entry.get("common", ())))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


@contextlib.contextmanager
def running(sweep_dir: Path) -> Iterator[bool]:
    """Hold the lock of the sweep while the block runs; yields False if another process holds it.

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
    """Whether a process runs the sweep; also True if the file system cannot tell."""
    if not (sweep_dir / _LOCK_FILE).exists():
        return False
    try:
        with running(sweep_dir) as free:
            return not free
    except OSError:
        return True
