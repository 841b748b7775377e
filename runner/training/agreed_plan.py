"""Compares, when the ranks have met, what each of them is about to run.

Every rank makes the plan for itself, with the memory and the cores of its own machine. On machines that are not alike
two ranks may come to two programs: messages that nobody awaits, other cuts, other layers that run again.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.config.compose.resolve import fingerprint
from runner.config.schema import RunConfig
from runner.engine.transport.objects import all_gather_values
from runner.errors import RunFailedError
from runner.plan.activations import searches
from runner.plan.values import RunPlan

__all__ = ["differing", "digests", "require_same_plan"]

_SHOWN = 12  # digits of a digest
_OF_THE_MACHINE = ("budget", "limit", "seconds", "peak")  # in names of fields that say how a decision came about


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
    """Hexadecimal digests of what a rank is about to run: of each part that must be the same on all ranks.

    A search that ends by the clock finds what it has time for, so that its programs are each rank's own.
    """
    schedule = plan.schedule
    parts: dict[str, Any] = {
        "request": fingerprint(config),
        "cut": (plan.partition, plan.layout, plan.topology.seats),
        "program": repr((schedule.name, schedule.placement, schedule.window_of_microbatch, plan.program.actions)),
        "offloaded weights": plan.weights,
    }
    if not searches(config):
        parts["activation checkpoints"] = (plan.activations.stages, plan.activations.to_host)
    return {name: hashlib.sha256(_text(part).encode()).hexdigest() for name, part in parts.items()}


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
                    f"of its {name} is {own[:_SHOWN]}, of rank 0 {digest[:_SHOWN]}. Each rank plans with the memory "
                    "and the cores of its own machine: give the smaller machine's memory to all, as memory_limit=16GB"
                )
    return None


def _text(value: Any) -> str:
    """A text of a value that is the same in each process that has an equal value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = [one.name for one in dataclasses.fields(value) if one.compare and not _tells_how(one.name)]
        return f"{type(value).__name__}({_joined(_text(getattr(value, name)) for name in own)})"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return f"{{{_joined(sorted(f'{_text(key)}:{_text(one)}' for key, one in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{_joined(sorted(map(_text, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{_joined(map(_text, value))}]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _joined(texts: Iterable[str]) -> str:
    return ",".join(texts)


def _tells_how(name: str) -> bool:
    return any(word in name for word in _OF_THE_MACHINE)
