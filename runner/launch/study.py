"""A sweep whose values are chosen by Optuna: a study asks, and the jobs of the sweep answer.

Every trial is a job of one sweep and stands in its ledger. The study's journal lies in the sweep's directory, so that a
study that is started again goes on: it knows what it was told, asks first for what was not finished, and its samplers
need no seed. Settings are :class:`runner.launch.hydra.search_settings.SearchSettings`, ``hydra.sweeper.*``.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.schema import RunConfig
from runner.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, Problem, RequestError, raise_problems
from runner.launch.hydra.journal import Journal
from runner.launch.hydra.pruner import PRUNED_FILE, split_pruner
from runner.launch.hydra.search_settings import GRID, SearchSettings, search_settings
from runner.launch.hydra.settings import SWEEPER
from runner.launch.hydra.space import Dimension, choices_of, space_of, split_searched
from runner.launch.rank import TRAIN_ENTRY
from runner.launch.run.directory import create_run_directory
from runner.launch.sweep.run import run_sweep, show_table
from runner.record import RunRecord, write_atomically

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial
    from rich.console import Console

__all__ = ["RESULTS_FILE", "study"]

logger = logging.getLogger(__name__)

RESULTS_FILE = "optimization_results.yaml"


def study(
    words: Sequence[str],
    plugins: Sequence[str],
    *,
    command: str,
    entry: str = TRAIN_ENTRY,
    console: Console | None = None,
) -> int:
    """Run the trials that the study asks for, and show a table of all of them.

    The value of a trial is the loss of its last validation or, without validation, of its last step.

    Args:
        words: the overrides; those with several values, e.g. ``interval(1e-4,1e-2)``, span the search space.
        plugins: the words about Hydra's plugins; ``hydra/sweeper`` is one of them.
        command, entry, console: see :func:`runner.launch.sweep.run.sweep`.

    Returns:
        1 if more trials failed than ``hydra.sweeper.max_failure_rate`` allows, 75 or 130 if the study was stopped,
        else 0.

    Raises:
        RequestError: the request or the search space is wrong.
    """
    from rich.console import Console

    from runner.plan.requested_schedule import resolve_request

    pruner, plugins = split_pruner(plugins)
    _, plain = split_searched(words)
    place = resolve_request(plain)
    settings = search_settings(plugins, place.name)
    searched, plain = split_searched([*words, *(f"{key}={value}" for key, value in settings.params.items())])
    raise_problems(pruner.problems(place))
    space, is_grid = space_of(searched), settings.sampler_name == GRID
    choices = choices_of(searched) if is_grid else {}
    directory = create_run_directory(place.name, place.run_dir)
    others = [word for word in plugins if SWEEPER not in word]
    plain = [*(word for word in plain if not word.startswith("run_dir=")), f"run_dir={directory}"]
    run = partial(run_sweep, command=command, entry=entry, console=Console(quiet=True), plugins=others)
    if is_grid:
        settings = replace(settings, n_trials=min(settings.n_trials, math.prod(map(len, choices.values()))))
    one = _Study(settings, space, [*plain, *pruner.words(settings.direction.value)], directory, run)
    status = one.run_trials(partial(settings.sampler_for, choices=choices), place)
    if one.begun:
        show_table(directory, console or Console())
    return status


@dataclass
class _Study:
    """A study, and what its trials are run with.

    Args:
        settings: ``hydra.sweeper.*``.
        space: the dimensions of the search.
        plain: the overrides that all trials share.
        directory: the sweep's.
        run: runs a batch of trials, see :func:`runner.launch.sweep.run.run_sweep`.
    """

    settings: SearchSettings
    space: Mapping[str, Dimension]
    plain: Sequence[str]
    directory: Path
    run: Any
    begun: bool = False

    def run_trials(self, sampler: Any, place: RunConfig) -> int:
        """Run all trials that are missing, in batches of ``hydra.sweeper.n_jobs``; return the study's exit status."""
        journal = Journal(self.directory)
        self.begun = bool(journal.trials)
        study = self._made(sampler(len(journal.trials)), journal, again=place.sweep_retry == "failed")
        done = sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
        missing = self.settings.n_trials - done
        while missing > 0:
            batch = min(missing, self.settings.n_jobs)
            missing -= batch
            status = self._run_batch(study, journal, batch)
            if status is not None:
                return status
        self._write_results(study)
        return EXIT_OK

    def _made(self, sampler: Any, journal: Journal, *, again: bool) -> Study:
        import optuna

        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(logging.WARNING)
        made = optuna.create_study(
            study_name=self.settings.study_name,
            storage=None,
            sampler=sampler,
            direction=self.settings.direction.value,
        )
        journal.enter(made, again=again)
        return made

    def _run_batch(self, study: Study, journal: Journal, size: int) -> int | None:
        """Run some trials at once; return the study's exit status if it ends with them."""
        trials = [study.ask() for _ in range(size)]
        asked = [self._words(trial) for trial in trials]
        for trial in trials:
            journal.asked(trial, study)
        self.begun = True
        status, jobs = self.run([[*self.plain, *words] for words in asked], shown=asked)
        if status in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
            return int(status)
        failed = sum(not self._tell(study, journal, *one) for one in zip(trials, jobs, strict=True))
        if failed / size > self.settings.max_failure_rate:
            logger.error("the study ends: %d of %d trials failed, see hydra.sweeper.max_failure_rate", failed, size)
            return EXIT_FAILED
        return None

    def _words(self, trial: Trial) -> list[str]:
        """The overrides of a trial."""
        try:
            for ask in self.space.values():
                ask(trial)
            if self.settings.custom_search_space is not None:
                _extend(self.settings.custom_search_space, trial, self.directory)
        except RequestError:
            raise
        except Exception as error:  # of Optuna, or of a user's function
            raise RequestError(
                [Problem("hydra.sweeper", ", ".join(self.space), "cannot search", str(error))]
            ) from error
        return [f"{name}={value}" for name, value in trial.params.items()]

    def _tell(self, study: Study, journal: Journal, trial: Trial, job: Path) -> bool:
        """Tell the study how a trial ended; return whether it did not fail."""
        from optuna.samplers import GridSampler
        from optuna.trial import TrialState

        value = _value(job)
        state = "fail" if value is None else "pruned" if (job / PRUNED_FILE).exists() else "complete"
        journal.told(trial.number, state, value)
        try:
            study.tell(trial, value if state == "complete" else None, state=TrialState[state.upper()])
        except RuntimeError:  # a grid sampler stops the study at its end, which no study can do that asks and tells
            if not isinstance(study.sampler, GridSampler):
                raise
        return state != "fail"

    def _write_results(self, study: Study) -> None:
        from omegaconf import OmegaConf

        found: dict[str, Any] = {"name": "optuna"}
        if any(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False)):
            found |= {"best_params": dict(study.best_params), "best_value": study.best_value}
        write_atomically(self.directory / RESULTS_FILE, OmegaConf.to_yaml(OmegaConf.create(found)))


def _extend(target: str, trial: Trial, directory: Path) -> None:
    """Call a user's function, which may ask the trial for further values."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(directory)}}})
    instantiate({"_target_": target, "_partial_": True})(config, trial)


def _value(job: Path) -> float | None:
    """The value of a trial; None if it failed."""
    record = RunRecord.load(job)
    if record.status != "ok":
        return None
    value = float(record.val_loss[-1][1] if record.val_loss else record.loss[-1])
    return None if math.isnan(value) else value
