"""Notes about ranks that share the cores of this machine, which a step that is played on resources does not know."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from runner.config.units import format_seconds
from runner.plan.draft import Draft
from runner.plan.memory.limits import ranks_of_a_node
from runner.plan.stages.figures import StageFigures

__all__ = ["core_notes", "num_cores"]


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_notes(draft: Draft, figures: Sequence[StageFigures]) -> Iterator[str]:
    """A note with the least time of a step if this machine is planned for and has fewer cores than threads are busy."""
    config, cores = draft.config, num_cores()
    ranks, threads = ranks_of_a_node(config), config.trainer.threads
    if config.hardware.name != "auto" or draft.needs.accelerated or ranks == 1 or ranks * threads <= cores:
        return
    microbatches = config.schedule.computed_microbatches * draft.layout.data
    of_one = sum(stage.seconds for stage in figures) * draft.mean_samples / draft.profile.samples
    seconds = of_one * microbatches * threads / cores
    who = f"{ranks} ranks" + (f" of {threads} threads each" if threads > 1 else "")
    least = f": a step takes at least {format_seconds(seconds)}" if seconds else ""
    yield f"{who} share {cores} core{'s' if cores != 1 else ''}{least}, whatever is predicted here; a run measures it"
