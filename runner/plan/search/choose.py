"""``schedule=auto`` in a plan: the search uses the stages' seconds and bytes, and the memory of each order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

from runner.config.schema import RunConfig
from runner.config.units import format_bytes, format_seconds
from runner.errors import RequestError
from runner.plan.activations import reads_budget
from runner.plan.requested_schedule import is_chosen_by_plan
from runner.plan.values import RunPlan
from runner.progress import now
from runner.schedule.catalogue.registry import SEARCHED, SPECS
from runner.schedule.generators.search import FOUND, Choice, Rated, search
from runner.schedule.kinds import ScheduleRequest
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.simulation.clock import StageCosts, simulate
from runner.schedule.values import Schedule

__all__ = ["choose", "with_named_order"]

_SHORTER = 0.999  # factor by which a step must be shorter for it to matter: seconds are measured


Assemble = Callable[[Schedule, Callable[[RunPlan], None]], RunPlan]
"""A function that makes the plan of a schedule, and shows the plans of all cuts that it has compared."""


def choose(config: RunConfig, assemble: Assemble) -> RunPlan:
    """Plan the schedule with the shortest predicted step that fits; the plan's advice begins with the reason.

    Args:
        config: a request with ``schedule=auto``.
        assemble: makes the plan of a schedule.

    Raises:
        RequestError: from ``assemble``, if it refuses every schedule.
    """
    plans: dict[Schedule, RunPlan] = {}
    costs: dict[tuple[int, ...], StageCosts] = {}
    bounds = _Bounds(config)
    refusals: list[RequestError] = []

    def rate(schedule: Schedule) -> tuple[float, bool] | None:
        try:
            plan = assemble(fuse_backwards(schedule), bounds.note)
        except RequestError as refusal:
            refusals.append(refusal)
            return None
        plans[schedule] = plan
        shortest = min((each.time.step_seconds for each in plans.values() if each.fits), default=None)
        best = (
            f"the best so far takes {format_seconds(shortest)} a step" if shortest is not None else "none fits so far"
        )
        now(f"schedule=auto: {len(plans)} orders planned, {best}")
        costs.setdefault(schedule.placement[0], plan.time.costs)
        return plan.time.step_seconds, plan.fits

    asked = config.schedule
    limit = asked.option("memory_limit")
    own = {} if limit is None else {"memory_limit": limit}
    request = ScheduleRequest(config.parallelism.pipeline, asked.microbatches, asked.chunks, options=own)
    try:
        choice = search(request, SEARCHED, costs.__getitem__, rate, bounds.of)
    except ValueError:
        raise refusals[0] from None
    plan, reason = plans[choice.best.schedule], _reason(choice, plans)
    if asked.option("asynchronous") == "allowed":
        found = _asynchronous(request, rate)
        if found is not None and (found.seconds < _SHORTER * choice.best.seconds or not choice.best.fits):
            plan, reason = plans[found.schedule], f"{_late(found, choice.best)}; synchronous: {reason}"
    return replace(plan, advice=(reason, *plan.advice), reasons=(reason, *plan.reasons))


class _Bounds:
    """Bounds the step of an order from below, by the durations of the same stages in the plans of other orders.

    Args:
        config: the request; nothing is known where what a stage recomputes or moves, or the place of a device, depends
            on the order, and where a step begins before the one before it has ended.
    """

    def __init__(self, config: RunConfig) -> None:
        by_order = reads_budget(config) or config.offload.activations != "none" or config.hardware.devices
        self._is_known = not (by_order or config.schedule.post_validation)
        self._lowest: dict[tuple[object, ...], StageCosts] = {}

    def note(self, plan: RunPlan) -> None:
        """Take the durations of a plan, of whose stages there may be several cuts."""
        found, key = plan.time.costs, _stages_in(plan.schedule)
        known = self._lowest.get(key, found)
        self._lowest[key] = StageCosts(
            F=_lower(known.F, found.F),
            B=_lower(known.B, found.B),
            I=_lower(known.I, found.I),
            W=_lower(known.W, found.W),
            comm=_lower(known.comm, found.comm),
        )

    def of(self, schedule: Schedule) -> float | None:
        """The least seconds of the computes and messages of an order; None if its stages are not known."""
        costs = self._lowest.get(_stages_in(schedule)) if self._is_known and not schedule.ahead else None
        return None if costs is None else simulate(fuse_backwards(schedule), costs).makespan / schedule.windows


def _lower(one: Sequence[float], other: Sequence[float]) -> Sequence[float]:
    return tuple(map(min, one, other))


def _stages_in(schedule: Schedule) -> tuple[object, ...]:
    """What decides how long stages take in an order."""
    return schedule.rows, schedule.parts, schedule.joined


def with_named_order(config: RunConfig, chosen: Schedule) -> RunConfig:
    """A changed request that leaves its order to the plan, with the one that was chosen before the change.

    Another search for every change would take as long as the first one each time. An order of its own, and one that
    does not suit the change, give way to 1f1b, so that the search finds nothing that is longer than what is told.

    Args:
        config: the changed request.
        chosen: the order of the request before.
    """
    if not is_chosen_by_plan(config):
        return config
    made = copy.deepcopy(config)
    asked = made.schedule
    request = ScheduleRequest(made.parallelism.pipeline, asked.microbatches, chosen.chunks)
    spec = SPECS.get(chosen.name)
    suits = spec is not None and spec.accepts(request)
    asked.name, asked.chunks = (chosen.name, chosen.chunks) if suits else ("1f1b", None)
    return made


def _asynchronous(request: ScheduleRequest, rate: Callable[[Schedule], tuple[float, bool] | None]) -> Rated | None:
    """The asynchronous order that fits and is the shortest; among those of equal time, the one that is least late."""
    rated = []
    for spec in SPECS.values():
        asked = replace(request, chunks=spec.default_chunks, options={})
        if spec.searched_if_allowed and request.chunks in (None, spec.default_chunks) and spec.accepts(asked):
            schedule = spec.generate(asked)
            worth = rate(schedule)
            if worth is not None and worth[1]:
                rated.append(Rated(schedule, *worth))
    shortest = min((each.seconds for each in rated), default=0.0)
    equal = [each for each in rated if each.seconds * _SHORTER <= shortest]
    return min(equal, key=lambda each: _lateness(each.schedule), default=None)


def _lateness(schedule: Schedule) -> tuple[bool, float]:
    """Whether backwards read other weights than their forwards, and the mean number of steps that forwards lack."""
    return schedule.reads_newest, sum(schedule.lags) / len(schedule.lags) / schedule.window_size


def _late(found: Rated, synchronous: Rated) -> str:
    schedule = found.schedule
    most = max(schedule.lags) / schedule.window_size
    shorter = 1 - found.seconds / synchronous.seconds
    told = f"schedule=auto takes {schedule.name}, which is asynchronous: {format_seconds(found.seconds)} a step"
    return f"{told}, {shorter:.1%} shorter, and gradients are up to {most:.2g} steps late"


def _reason(choice: Choice, plans: dict[Schedule, RunPlan]) -> str:
    best = choice.best
    told = f"schedule=auto takes {_name(best)}: {format_seconds(best.seconds)} a step, "
    told += f"{choice.over_bound:.3f} of the least time that any order of these stages takes"
    if choice.beaten is not None:
        longer = choice.beaten.seconds / best.seconds - 1
        told += f"; next is {_name(choice.beaten)}, {format_seconds(choice.beaten.seconds)} ({longer:.1%} longer)"
    if choice.too_large is not None:
        large = plans[choice.too_large.schedule]
        peak, limit = format_bytes(large.peak_memory_bytes[large.fullest]), format_bytes(large.limit_of(large.fullest))
        name, seconds = _name(choice.too_large), format_seconds(choice.too_large.seconds)
        told += f"; {name} would take {seconds}, but {peak} of {limit}"
    return (
        f"{told}; further orders from list scheduling were left out, which would take long" if choice.is_cut else told
    )


def _name(rated: Rated) -> str:
    schedule = rated.schedule
    name = "an order of its own" if schedule.name == FOUND else schedule.name
    if len(schedule.placement) > 1:
        joined = " and forwards of two micro-batches" if schedule.joined > 1 else ""
        return f"{name} with {len(schedule.placement)} pipelines{joined}"
    return f"{name} with {schedule.chunks} chunks per rank" if schedule.chunks > 1 else name
