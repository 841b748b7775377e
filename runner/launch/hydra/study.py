"""A sweep whose values are chosen by a sampler: Hydra's Optuna sweeper asks, and the jobs of the sweep answer.

Every trial is a job of one sweep and stands in its ledger. When a study with a seeded sampler is started again, it asks
for the same values, and jobs that are done are not run again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from runner.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, Problem, RequestError
from runner.launch.hydra.settings import SWEEPER, plugin_settings
from runner.launch.rank import TRAIN_ENTRY
from runner.launch.run.directory import create_run_directory
from runner.launch.sweep.run import run_sweep, show_table
from runner.record import RunRecord

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["study"]

logger = logging.getLogger(__name__)


def study(
    words: Sequence[str],
    plugins: Sequence[str],
    *,
    command: str,
    entry: str = TRAIN_ENTRY,
    console: Console | None = None,
) -> int:
    """Run the trials that the sweeper asks for, and show a table of all of them.

    The value of a trial is the loss of its last validation or, without validation, of its last step.

    Args:
        words: the overrides; those with several values, e.g. ``interval(1e-4,1e-2)``, span the search space.
        plugins: the words about Hydra's plugins; ``hydra/sweeper`` is one of them.
        command, entry, console: see :func:`runner.launch.sweep.run.sweep`.

    Returns:
        1 if more trials failed than the sweeper allows, 75 or 130 if the study was stopped, else 0.

    Raises:
        RequestError: the request or the search space is wrong.
    """
    from hydra.utils import instantiate
    from omegaconf import OmegaConf
    from rich.console import Console

    from runner.plan.requested_schedule import resolve_request

    searched, plain = _searched(words)
    place = resolve_request(plain)
    settings = plugin_settings(SWEEPER, plugins, place.name)
    directory = create_run_directory(place.name, place.run_dir)
    trials = _Trials(plain, directory, [word for word in plugins if SWEEPER not in word], command, entry)
    sweeper = instantiate(settings).sweeper  # Hydra's own wrapper adds nothing but an older interface
    sweeper.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(directory)}}})
    sweeper.hydra_context, sweeper.launcher, sweeper.job_idx = object(), trials, 0
    sweeper.sweep_dir = str(directory)
    status = EXIT_OK
    try:
        sweeper.sweep(searched)
    except _StoppedError as error:
        status = error.status
    except RequestError:
        raise
    except Exception as error:  # raised by Optuna, or by the sweeper when too many trials failed
        if not trials.begun:
            raise RequestError([Problem("hydra.sweeper", " ".join(searched), "cannot search", str(error))]) from error
        logger.error("the study ends: %s", error)
        status = EXIT_FAILED
    if trials.begun:
        show_table(directory, console or Console())
    return status


class _StoppedError(Exception):
    """Raised when the sweep was told to stop."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Trials:
    """Takes the place of Hydra's launcher for the sweeper."""

    def __init__(self, plain: Sequence[str], directory: Path, plugins: Sequence[str], command: str, entry: str) -> None:
        self.begun = False
        self._plain = [*(word for word in plain if not word.startswith("run_dir=")), f"run_dir={directory}"]
        self._plugins = plugins
        self._command = command
        self._entry = entry

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        """Run a batch of trials; for each, return an object with its ``return_value``."""
        from rich.console import Console

        self.begun = True
        status, jobs = run_sweep(
            [[*self._plain, *overrides] for overrides in job_overrides],
            shown=job_overrides,
            command=self._command,
            entry=self._entry,
            console=Console(quiet=True),
            plugins=self._plugins,
        )
        if status in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
            raise _StoppedError(status)
        return [SimpleNamespace(return_value=_value(job)) for job in jobs]


def _value(job: Path) -> float:
    record = RunRecord.load(job)
    if record.status != "ok":
        return math.nan
    return float(record.val_loss[-1][1] if record.val_loss else record.loss[-1])


def _searched(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words with several values, and the other words."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    searched = []
    for word in words:
        try:
            if parser.parse_override(word).is_sweep_override():
                searched.append(word)
        except HydraException:
            continue  # reported with the other problems when the request is resolved
    return searched, [word for word in words if word not in searched]
