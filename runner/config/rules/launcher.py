"""Rules of ``launcher``: what a cluster's job may ask for, and what belongs to no other launcher."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from runner.config.rules.numbers import positive
from runner.config.schema import LauncherConfig, RunConfig
from runner.errors import Problem

__all__ = ["LAUNCHERS", "launcher_rules"]

LAUNCHERS = ("local", "slurm")

_TIME_LIMIT = re.compile(r"(\d+-)?\d{1,3}(:\d{1,2}){0,2}")
_OF_SLURM = (
    *("nodes", "gpus_per_node", "cpus_per_task", "time_limit", "signal_seconds", "requeue"),
    *("partition", "account", "sbatch", "wait", "dry_run"),
)
_ONE_OPTION = """'launcher.sbatch=["--exclusive"]'"""
# What the runner writes itself, from keys of its own.
_WRITTEN = {
    "--nodes": "launcher.nodes",
    "--ntasks": "parallelism",
    "--ntasks-per-node": "launcher.nodes",
    "--gpus-per-node": "launcher.gpus_per_node",
    "--cpus-per-task": "launcher.cpus_per_task",
    "--time": "launcher.time_limit",
    "--signal": "launcher.signal_seconds",
    "--requeue": "launcher.requeue",
    "--no-requeue": "launcher.requeue",
    "--partition": "launcher.partition",
    "--account": "launcher.account",
    "--output": "run_dir",
    "--job-name": "name",
}


def launcher_rules(config: RunConfig) -> Iterator[Problem]:
    """Every rule of the section that ``config`` breaks."""
    launcher = config.launcher
    for key, fix in (("rendezvous_timeout_seconds", "60"), ("step_timeout_seconds", "600")):
        value = getattr(launcher, key)
        if not (value > 0 and math.isfinite(value)):
            yield Problem(f"launcher.{key}", value, "must be a finite number above 0", fix=f"launcher.{key}={fix}")
    yield from positive("launcher.watchdog_seconds", launcher.watchdog_seconds, "300")
    if launcher.max_restarts < 0:
        yield Problem(
            "launcher.max_restarts", launcher.max_restarts, "must be at least 0", fix="launcher.max_restarts=0"
        )
    if launcher.name == "slurm":
        yield from _of_slurm(config)
    elif launcher.name == "local":
        yield from _of_others(launcher)


def _of_others(launcher: LauncherConfig) -> Iterator[Problem]:
    defaults = LauncherConfig()
    for key in _OF_SLURM:
        value = getattr(launcher, key)
        if value != getattr(defaults, key):
            why = "The launcher local starts all ranks on this machine"
            yield Problem(f"launcher.{key}", value, "belongs to launcher=slurm", why, "launcher=slurm")


def _of_slurm(config: RunConfig) -> Iterator[Problem]:
    launcher, degrees = config.launcher, config.parallelism
    for key, least in (("nodes", 1), ("gpus_per_node", 0), ("cpus_per_task", 1), ("signal_seconds", 1)):
        value = getattr(launcher, key)
        if value is not None and value < least:
            yield Problem(f"launcher.{key}", value, f"must be at least {least}", fix=f"launcher.{key}={least}")
    ranks, nodes = degrees.pipeline * degrees.data * degrees.tensor, launcher.nodes or 1
    if nodes > 0 and ranks > 0 and ranks % nodes:
        rule = f"must divide the number of ranks, {ranks}"
        fits = max(count for count in range(1, nodes + 1) if ranks % count == 0)
        yield Problem("launcher.nodes", nodes, rule, "Every node runs as many ranks", f"launcher.nodes={fits}")
    if launcher.time_limit is not None and _TIME_LIMIT.fullmatch(launcher.time_limit) is None:
        rule = "must be minutes or [days-]hours:minutes:seconds"
        yield Problem("launcher.time_limit", launcher.time_limit, rule, fix="launcher.time_limit=12:00:00")
    for key in ("partition", "account"):
        value = getattr(launcher, key)
        if value is not None and (not value or re.search(r"\s", value)):
            yield Problem(f"launcher.{key}", value, "must be one word", fix=f"launcher.{key}=null")
    yield from _options(launcher)


def _options(launcher: LauncherConfig) -> Iterator[Problem]:
    for option in launcher.sbatch:
        name = option.partition("=")[0].strip()
        if "\n" in option or re.fullmatch(r"--[a-z][a-z-]*(=.*)?", option) is None:
            rule = "each must be one option of sbatch, --name or --name=value"
            yield Problem("launcher.sbatch", option, rule, fix=_ONE_OPTION)
        elif name in _WRITTEN:
            why = "The batch script would say it twice"
            yield Problem("launcher.sbatch", option, f"{name} follows from {_WRITTEN[name]}", why, _WRITTEN[name])
