"""Rules of ``launcher``: valid values for a cluster's job, and keys that belong to one launcher only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runner.config.rules.table import Computed, Row, Table, value_at
from runner.config.rules.values import at_least, positive
from runner.config.schema import LauncherConfig, RunConfig
from runner.errors import Problem

__all__ = ["LAUNCHERS", "LAUNCHER_TABLES"]

LAUNCHERS = ("local", "slurm")

_TIME_LIMIT = re.compile(r"(\d+-)?\d{1,3}(:\d{1,2}){0,2}")
_OF_SLURM = (
    *("nodes", "gpus_per_node", "cpus_per_task", "time_limit", "signal_seconds", "requeue"),
    *("partition", "account", "sbatch", "wait", "dry_run"),
)
_ONE_OPTION = """'launcher.sbatch=["--exclusive"]'"""
# Options of sbatch that the runner writes itself, each with the key that decides it.
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


def _is_one_word(value: str | None) -> bool:
    return value is None or (bool(value) and re.search(r"\s", value) is None)


_ANY: Table[RunConfig] = Table(
    "Launcher",
    (
        positive("launcher.rendezvous_timeout_seconds", "60"),
        positive("launcher.step_timeout_seconds", "600"),
        positive("launcher.watchdog_seconds", "300"),
        positive("launcher.grace_seconds", "120"),
        at_least("launcher.max_restarts", 0),
    ),
)


def _of_slurm(key: str) -> Row[RunConfig]:
    path, unset = f"launcher.{key}", getattr(LauncherConfig(), key)
    return Row(
        path,
        lambda c: bool(value_at(c, path) != unset),
        "belongs to launcher=slurm",
        "The launcher local starts all ranks on this machine",
        fix="launcher=slurm",
    )


_LOCAL: Table[RunConfig] = Table(
    "launcher=local", tuple(map(_of_slurm, _OF_SLURM)), applies=lambda c: c.launcher.name == "local"
)


def _ranks(config: RunConfig) -> int:
    degrees = config.parallelism
    return degrees.pipeline * degrees.data * degrees.tensor


def _uneven_nodes(config: RunConfig) -> Iterator[Problem]:
    ranks, nodes = _ranks(config), config.launcher.nodes or 1
    if nodes > 0 and ranks > 0 and ranks % nodes:
        rule = f"must divide the number of ranks, {ranks}"
        fits = max(count for count in range(1, nodes + 1) if ranks % count == 0)
        yield Problem("launcher.nodes", nodes, rule, "Every node runs as many ranks", f"launcher.nodes={fits}")


def _one_word(key: str) -> Row[RunConfig]:
    path = f"launcher.{key}"
    return Row(path, lambda c: not _is_one_word(value_at(c, path)), "must be one word", fix=f"{path}=null")


def _batch_options(config: RunConfig) -> Iterator[Problem]:
    for option in config.launcher.sbatch:
        name = option.partition("=")[0].strip()
        if "\n" in option or re.fullmatch(r"--[a-z][a-z-]*(=.*)?", option) is None:
            rule = "each must be one option of sbatch, --name or --name=value"
            yield Problem("launcher.sbatch", option, rule, fix=_ONE_OPTION)
        elif name in _WRITTEN:
            why = "The batch script would say it twice"
            yield Problem("launcher.sbatch", option, f"{name} follows from {_WRITTEN[name]}", why, _WRITTEN[name])


_SLURM: Table[RunConfig] = Table(
    "launcher=slurm",
    (
        at_least("launcher.nodes", 1),
        at_least("launcher.gpus_per_node", 0),
        at_least("launcher.cpus_per_task", 1),
        at_least("launcher.signal_seconds", 1),
        Row(
            "launcher.grace_seconds",
            lambda c: c.launcher.grace_seconds is not None,
            "belongs to launcher=local",
            "SLURM itself ends the ranks, launcher.signal_seconds after it has told them to stop",
            fix="launcher.grace_seconds=null",
        ),
        Computed("launcher.nodes", _uneven_nodes, "must divide the number of ranks", "Every node runs as many ranks"),
        Row(
            "launcher.time_limit",
            lambda c: c.launcher.time_limit is not None and _TIME_LIMIT.fullmatch(c.launcher.time_limit) is None,
            "must be minutes or [days-]hours:minutes:seconds",
            fix="launcher.time_limit=12:00:00",
        ),
        _one_word("partition"),
        _one_word("account"),
        Computed(
            "launcher.sbatch",
            _batch_options,
            f"each must be one option of sbatch, --name or --name=value, and none of {', '.join(_WRITTEN)}",
            "The batch script has these from keys of the request, and would say them twice",
        ),
    ),
    applies=lambda c: c.launcher.name == "slurm",
)

LAUNCHER_TABLES = (_ANY, _LOCAL, _SLURM)
"""All tables of this file, in the order in which they are checked."""
