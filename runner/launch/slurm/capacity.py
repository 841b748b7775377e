"""Asks SLURM, before a job is submitted, whether the cluster has nodes on which it can ever run.

Unless its administrator has set EnforcePartLimits, SLURM accepts a job that no node can hold, and never starts it.
Source: sbatch(1), sinfo(1) and slurm.conf(5) of SLURM 22.05.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from runner.config.schema import RunConfig
from runner.errors import Problem, raise_problems
from runner.launch.slurm.script import batch_script, cpus_per_rank, ranks_per_node
from runner.launch.slurm.step import without_job

__all__ = ["refuse_too_large", "too_large"]

logger = logging.getLogger(__name__)

_SECONDS = 60
_REFUSAL = "allocation failure:"  # what sbatch --test-only says of a job that could not start


def refuse_too_large(config: RunConfig) -> None:
    """Refuse a request that is too large for all nodes of its partition, and warn where SLURM has another objection.

    SLURM itself is asked first, because options of ``launcher.sbatch`` may change what a job needs. Its answer alone
    refuses nothing: it counts no node that is switched off now.

    Raises:
        RequestError: no node has so many CPUs, or the partition has too few nodes.
    """
    objection = _objection(batch_script(config, Path("run"), ["true"], working_directory=Path.cwd()))
    if objection:
        raise_problems(list(too_large(config, _nodes())))
        logger.warning("SLURM says that this job could not start as the cluster is now: %s", objection)


def too_large(config: RunConfig, partitions: Mapping[str, Sequence[int]]) -> Iterator[Problem]:
    """Yield what the request asks for beyond what any of its partitions has.

    Args:
        partitions: name of each partition to the CPUs of each of its nodes. The default one's name ends with ``*``.
    """
    asked = set(config.launcher.partition.split(",")) if config.launcher.partition is not None else None
    found = {
        name.rstrip("*"): cpus
        for name, cpus in partitions.items()
        if (name.endswith("*") if asked is None else name.rstrip("*") in asked)
    }
    if not found:
        return
    shown = f"the partition {', '.join(found)}"
    nodes, most_nodes = config.launcher.nodes or 1, max(map(len, found.values()))
    if nodes > most_nodes:
        why = f"SLURM would keep the job in its queue for ever: {shown} has no more nodes"
        yield Problem("launcher.nodes", nodes, f"must be at most {most_nodes}", why, _fewer_nodes(config, most_nodes))
    ranks, cpus, most_cpus = ranks_per_node(config), cpus_per_rank(config), max(map(max, found.values()))
    if ranks * cpus > most_cpus:
        on_each = f"{ranks} ranks of {cpus} CPUs each" if ranks > 1 else f"a rank of {cpus} CPUs"
        no_node = f"and no node of {shown} has more than {most_cpus}"
        why = f"SLURM would keep the job in its queue for ever: every node would run {on_each}, {no_node}"
        fits = most_cpus // ranks
        rule = f"must be at most {fits}" if fits else f"{ranks} ranks must not be on one node"
        fix = f"launcher.cpus_per_task={fits}" if fits else ""
        yield Problem("launcher.cpus_per_task", cpus, rule, why, fix)


def _fewer_nodes(config: RunConfig, most: int) -> str:
    ranks = ranks_per_node(config) * (config.launcher.nodes or 1)
    return f"launcher.nodes={max(count for count in range(1, most + 1) if ranks % count == 0)}"


def _objection(script: str) -> str:
    """What SLURM says against a script that is not submitted; empty where it could start, or nothing is said."""
    with without_job():
        said = _said(["sbatch", "--test-only"], script).stderr
    lines = [line for line in said.splitlines() if line.startswith(_REFUSAL)]
    return lines[0].removeprefix(_REFUSAL).strip() if lines else ""


def _nodes() -> dict[str, list[int]]:
    """The CPUs of all nodes of each partition, also of those that are switched off; empty if SLURM does not say."""
    found: dict[str, list[int]] = {}
    for line in _said(["sinfo", "--noheader", "--Node", "--format", "%P %c"]).stdout.splitlines():
        partition, _, cpus = line.strip().partition(" ")
        if cpus.isdecimal():
            found.setdefault(partition, []).append(int(cpus))
    return found


def _said(command: Sequence[str], script: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=script, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
