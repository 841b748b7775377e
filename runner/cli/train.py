"""``runner train``: one run, or a sweep of them."""

from __future__ import annotations

import shlex

from runner.cli.arguments import Arguments
from runner.cli.request import checked, jobs_of

__all__ = ["run"]


def run(arguments: Arguments) -> int:
    """Train what the overrides ask for.

    Raises:
        RequestError, DoesNotFitError: before anything is written or started.
    """
    command = shlex.join(["runner", "train", *arguments.words, *(["-m"] if arguments.switch("multirun") else [])])
    if arguments.switch("multirun"):
        jobs = jobs_of(arguments)
        from runner.launch.sweep import sweep

        return sweep(jobs, command=command)
    config = checked(arguments.words, arguments.problems)
    from runner.launch.start import train

    return train(config, command=command)
