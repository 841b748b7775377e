"""``runner train``: one run, or a sweep of runs."""

from __future__ import annotations

import logging
import shlex
import time
from dataclasses import replace

from runner.cli import screen
from runner.cli.arguments import Arguments
from runner.cli.auto import words_with_batch, words_with_layout
from runner.cli.request import checked, jobs_of
from runner.config.schema import RunConfig
from runner.errors import DoesNotFitError, Problem, raise_problems
from runner.launch.run.find_layout import asks_for_layout
from runner.launch.run.largest_batch import asks_for_batch
from runner.progress import doing, now

__all__ = ["run"]

logger = logging.getLogger(__name__)

_OF_SWEEPS = ("sweep_retry", "sweep_on_failure")


def run(arguments: Arguments) -> int:
    """Train what the overrides request.

    Raises:
        RequestError, DoesNotFitError: before anything is written or started.
    """
    begun = time.perf_counter()
    command = shlex.join(["runner", "train", *arguments.words, *(["-m"] if arguments.switch("multirun") else [])])
    if arguments.switch("multirun"):
        from runner.launch.hydra.settings import SWEEPER, chooses, split_words

        plugins, words = split_words(arguments.words)
        if chooses(SWEEPER, plugins):
            from runner.launch.study import study

            raise_problems(arguments.problems)
            return study(words, plugins, command=command)
        jobs = jobs_of(replace(arguments, words=tuple(words)))
        from runner.launch.sweep.run import sweep

        return sweep(jobs, command=command, plugins=plugins)
    unread: list[str] = []
    request = arguments.words
    if asks_for_batch(request):
        raise_problems(arguments.problems)
        batch = words_with_batch(request)
        logger.info("%s", batch.line)
        request = batch.words
    if asks_for_layout(request):
        raise_problems(arguments.problems)
        request = words_with_layout(request)
    config = checked(request, arguments.problems, command="train", unread=unread)
    raise_problems(_of_sweeps(config))
    screen.tell(unread)
    screen.begins(screen.PLANNING)
    from runner.launch.start import train

    try:
        return train(config, command=command, begun=begun)
    except DoesNotFitError as error:
        if not error.problems:
            raise
        from runner.launch.run.fitting import with_layout_that_fits

        with doing(screen.PLANNING):
            found = with_layout_that_fits(error.problems, request, now)
        raise DoesNotFitError("\n".join(problem.line() for problem in found), found) from None


def _of_sweeps(config: RunConfig) -> list[Problem]:
    """Problems for keys that concern sweeps but are set for a single run."""
    return [
        Problem(key, getattr(config, key), "belongs to a sweep", "This command starts one run", "-m")
        for key in _OF_SWEEPS
        if getattr(config, key) != getattr(RunConfig(), key)
    ]
