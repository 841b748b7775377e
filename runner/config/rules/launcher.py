"""Rules of ``launcher``: valid values for a cluster's job, and keys that belong to one launcher only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from runner.config.rules.table import Computed, Row, Table, value_at
from runner.config.rules.values import at_least, belongs, positive
from runner.config.schema import RunConfig
from runner.errors import Problem

__all__ = ["LAUNCHERS", "LAUNCHER_TABLES"]

LAUNCHERS = ("local", "slurm")

_TIME_LIMIT = re.compile(r"(\d+-)?\d{1,3}(:\d{1,2}){0,2}")
_OF_SLURM = (
    *("nodes", "gpus_per_node", "cpus_per_task", "time_limit", "signal_seconds", "requeue"),
    *("partition", "account", "sbatch", "setup", "prefix", "wait", "dry_run"),
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
        positive("launcher.start_timeout_seconds", "3600"),
        positive("launcher.step_timeout_seconds", "600"),
        positive("launcher.exit_timeout_seconds", "600"),
        positive("launcher.watchdog_seconds", "300"),
        positive("launcher.grace_seconds", "120"),
        at_least("launcher.max_restarts", 0),
    ),
)


def _of_slurm(key: str) -> Row[RunConfig]:
    why = "The launcher local starts all ranks on this machine"
    return belongs(f"launcher.{key}", "launcher=slurm", why, fix="launcher=slurm")


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


def _crowded_nodes(config: RunConfig) -> Iterator[Problem]:
    """More ranks on a node than it has devices; nothing where the ranks compute on a CPU, or nobody says how many."""
    ranks, nodes, launcher = _ranks(config), config.launcher.nodes or 1, config.launcher
    devices, source = launcher.gpus_per_node, "launcher.gpus_per_node"
    if devices is None and config.device == "cuda":
        devices, source = config.hardware.devices_per_node, f"hardware={config.hardware.name}"
    if config.device == "cpu" or not devices or devices < 0 or nodes < 1 or ranks % nodes or ranks <= nodes * devices:
        return
    enough = next(count for count in range(nodes, ranks + 1) if ranks % count == 0 and ranks <= count * devices)
    has = f"a node has {devices} GPU{'s' * (devices > 1)} ({source})"
    rule = f"must be {enough} or more for {ranks} ranks"
    why = f"Every rank has a GPU of its own: {ranks // nodes} ranks would be on each node, and {has}"
    yield Problem("launcher.nodes", nodes, rule, why, f"launcher.nodes={enough}")


def _unreadable_prefix(config: RunConfig) -> Iterator[Problem]:
    try:
        shlex.split(config.launcher.prefix or "")
    except ValueError as error:
        rule, fix = "must be words as a shell reads them", "launcher.prefix='apptainer exec --nv torch.sif'"
        yield Problem("launcher.prefix", config.launcher.prefix, rule, str(error), fix)


def _broken_path(config: RunConfig) -> bool:
    """Whether the path of the job's log has a character that no option of a batch script can have."""
    return re.search(r"[\n\r\\]", config.run_dir or config.name) is not None


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
        Computed(
            "launcher.nodes",
            _crowded_nodes,
            "must be so many that no node has more ranks than GPUs",
            "Every rank has a GPU of its own",
        ),
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
        Row(
            "launcher.setup",
            lambda c: any(not line.strip() or "\0" in line for line in c.launcher.setup),
            "each must be a line of shell",
            fix="'launcher.setup=[\"module load cuda\"]'",
        ),
        Computed("launcher.prefix", _unreadable_prefix, "must be words as a shell reads them"),
        Row(
            "run_dir",
            _broken_path,
            "must have no line break and no backslash",
            "sbatch reads the options of a batch script line by line, and SLURM drops backslashes in the path of a log",
            fix="run_dir=outputs/run",
            value=lambda c: c.run_dir or f"outputs/{c.name}",
        ),
    ),
    applies=lambda c: c.launcher.name == "slurm",
)

LAUNCHER_TABLES = (_ANY, _LOCAL, _SLURM)
"""All tables of this file, in the order in which they are checked."""
