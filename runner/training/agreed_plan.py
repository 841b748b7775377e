"""Compares, when the ranks have met, what each of them is about to run.

Every rank reads the plan from the run's directory. Where that is not one directory for all, or one machine still shows
an older file, two ranks would run two programs: messages that nobody awaits, other cuts, other layers that run again.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from runner.config.compose.resolve import fingerprint
from runner.config.schema import RunConfig
from runner.engine.transport.objects import all_gather_values
from runner.errors import RunFailedError
from runner.plan.values import RunPlan
from runner.stored import value_text

__all__ = ["differing", "digests", "require_same_plan"]

_SHOWN = 12  # digits of a digest


def require_same_plan(config: RunConfig, plan: RunPlan) -> None:
    """Compare the plan over all ranks, before anything else that they do together; all ranks call it.

    Raises:
        RunFailedError: two ranks would run two programs; every rank raises the error.
    """
    if plan.topology.world_size == 1:
        return
    found = differing(all_gather_values({"host": platform.node(), "digests": digests(config, plan)}))
    if found is not None:
        raise RunFailedError(found)


def digests(config: RunConfig, plan: RunPlan) -> dict[str, str]:
    """Hexadecimal digests of what a rank is about to run: of each part that must be the same on all ranks."""
    parts = {
        "request": fingerprint(config),
        "cut": (plan.partition, plan.topology),
        "program": plan.program,
        "activation checkpoints": plan.activations,
        "offloaded weights": plan.weights,
    }
    return {name: hashlib.sha256(value_text(part).encode()).hexdigest() for name, part in parts.items()}


def differing(ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """What to say of ranks whose digests differ from those of rank 0; None if all agree.

    Args:
        ranks: the name of the ``host`` and the ``digests`` of every rank.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks):
        for name, digest in first["digests"].items():
            own = other["digests"].get(name, "none")
            if own != digest:
                return (
                    f"rank {rank} on {other['host']} would run another plan than rank 0 on {first['host']}: the digest "
                    f"of its {name} is {own[:_SHOWN]}, of rank 0 {digest[:_SHOWN]}. Ranks read both from the run's "
                    "directory: run_dir must be one directory that all machines share"
                )
    return None
