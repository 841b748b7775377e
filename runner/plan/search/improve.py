"""The one override that would shorten a plan's step most; every candidate is planned, so that its gain is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runner.config.guests import is_own
from runner.config.schema import RunConfig
from runner.config.units import format_seconds
from runner.plan.cores import num_cores
from runner.plan.requested_schedule import is_chosen_by_plan
from runner.plan.search.trials import (
    BUDGET,
    Overrides,
    Replan,
    cost_of_trial,
    doubled,
    of_equals,
    of_one_size,
    policy,
    spelled,
    tried,
)
from runner.plan.values import RunPlan
from runner.schedule.catalogue.registry import SEARCHED

__all__ = ["Improvement", "best_override"]


@dataclass(frozen=True, slots=True)
class Improvement:
    """An override that makes the step shorter.

    Args:
        overrides: the words of a command line.
        seconds: the seconds of a step with it.
        before: the seconds of a step without it.
    """

    overrides: str
    seconds: float
    before: float

    @property
    def line(self) -> str:
        """The line for a reader of the plan."""
        gain = 1 - self.seconds / self.before
        times = f"{format_seconds(self.seconds)} instead of {format_seconds(self.before)}"
        return f"{self.overrides} would make a step {gain:.0%} shorter: {times}"


def best_override(
    plan: RunPlan, config: RunConfig, replan: Replan, *, measures_threads: bool, least_gain: float
) -> Improvement | None:
    """Find the change of one policy with the shortest predicted step that fits; None if none gains enough.

    Only changes that keep what is learned are tried: no other batch, precision, optimizer or asynchronous schedule, and
    no other micro-batches where layers see their statistics.

    Args:
        plan: a plan that fits.
        config: its request.
        replan: plans a changed request.
        measures_threads: whether ``replan`` measures the layers again with another number of threads on this machine.
        least_gain: the share of a step that a change must gain.
    """
    left, before = BUDGET, plan.time.step_seconds
    best: Improvement | None = None
    by_samples = any(layer.has_running_statistics for layer in plan.profile.layers)
    for overrides in _candidates(config, measures_threads=measures_threads, keeps_microbatches=by_samples):
        cost = cost_of_trial(config, overrides, plan)
        if cost > min(left, BUDGET // 3):  # so that at least three are tried
            continue
        left -= cost
        found = tried(config, overrides, replan)
        if found is None or not found.fits or found.profile.is_disturbed:
            continue
        seconds = found.time.step_seconds
        if seconds < (best.seconds if best is not None else before * (1 - least_gain)):
            best = Improvement(spelled(overrides), seconds, before)
    return best


def _candidates(config: RunConfig, *, measures_threads: bool, keeps_microbatches: bool) -> Iterator[Overrides]:
    if measures_threads and (threads := _threads_for_each(config)) > config.trainer.threads:
        yield {"trainer.threads": threads}
    if config.activation_checkpoint.name != "none":
        yield policy(config, "none")
    if config.offload.scope == "all":  # one strategy moves both
        yield {"offload.activations": "none", "offload.weights": "none", "offload.scope": "activations"}
    for part in ("optimizer", "parameters", *(("activations", "weights") if config.offload.scope != "all" else ())):
        if getattr(config.offload, part) != "none":
            yield {f"offload.{part}": "none", **({"offload.target": None} if is_own(config.offload, part) else {})}
    if config.parallelism.data > 1:
        yield from ({"zero.stage": stage} for stage in range(config.zero.stage or 0))
    share = -(-config.data.batch_size // config.parallelism.data)
    counts = {config.schedule.microbatches // 2, *doubled(config.schedule.microbatches, share)}
    if config.schedule.name != "from_file" and not keeps_microbatches:
        alike = of_one_size(config)
        yield from ({"schedule.microbatches": n, **alike} for n in sorted(counts - {0, config.schedule.microbatches}))
    if config.parallelism.pipeline > 1:
        yield from _of_pipelines(config)


def _of_pipelines(config: RunConfig) -> Iterator[Overrides]:
    if config.partition.name != "auto":
        yield {"partition": "auto"}
    if not is_chosen_by_plan(config):
        yield from (
            {"schedule": spec.name, **of_equals(config)} for spec in SEARCHED if spec.name != config.schedule.name
        )


def _threads_for_each(config: RunConfig) -> int:
    """Cores of this machine for each rank, if all ranks are on it."""
    degrees = config.parallelism
    return num_cores() // (degrees.pipeline * degrees.data * degrees.tensor)
