"""``data.batch_size=max``: the largest batch whose plan fits, as words that a user could have typed.

The number of micro-batches stays, and each gets as many samples as fit. Peaks grow with them, so few plans are made:
a first guess by a line or by the search's estimate, and then those sizes between which the answer must lie.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runner.config.compose.resolve import resolve_with_layers
from runner.config.rules.sections import rules
from runner.config.schema import RunConfig
from runner.config.units import format_bytes
from runner.errors import DoesNotFitError, Problem, RequestError, raise_problems
from runner.launch.run.find_layout import asks_for_layout, find_layout, ranks_to_share
from runner.plan.requested_schedule import resolve_request, schedule_problems

if TYPE_CHECKING:
    from runner.plan.planners.values import PlanningProblem
    from runner.plan.values import RunPlan

__all__ = ["MAX", "LargestBatch", "asks_for_batch", "largest", "largest_batch"]

MAX = "data.batch_size=max"
_KEY = "data.batch_size"
_MOST = 1 << 20  # samples of a micro-batch
_SECOND = 16  # samples of the second micro-batch that is planned: peaks lie about on the line through both
_LOOKED_AT = 64  # samples whose shapes are compared


@dataclass(frozen=True)
class LargestBatch:
    """What was found.

    Args:
        words: the request with the size.
        size: samples of a step.
        samples: the samples of a micro-batch.
        microbatches: micro-batches of a step, over all replicas.
        peak, limit: bytes of the fullest rank, and what it may use.
        next_size, next_peak: the next size, which does not fit, and its peak; None: there are no more samples.
        plans: how many sizes were planned.
    """

    words: tuple[str, ...]
    size: int
    samples: int
    microbatches: int
    peak: int
    limit: int
    next_size: int | None
    next_peak: int | None
    plans: int

    @property
    def line(self) -> str:
        """It in one line."""
        each = f"{self.samples:,} in each of {self.microbatches:,} micro-batch{'es' if self.microbatches > 1 else ''}"
        told = f"{MAX}: {self.size:,} samples ({each}), {format_bytes(self.peak)} of {format_bytes(self.limit)}"
        if self.next_peak is not None and self.next_size is not None:
            told = f"{told}; {self.next_size:,} would lack {format_bytes(self.next_peak - self.limit)}"
        else:
            told = f"{told}; the data has no more samples, or none more were tried"
        return f"{told}; {self.plans} sizes were planned. Another batch size changes what is learned."

    def to_json(self) -> dict[str, Any]:
        """It as a document."""
        return {
            "size": self.size,
            "peak_memory_bytes": self.peak,
            "next_size": self.next_size,
            "next_peak_memory_bytes": self.next_peak,
            "plans": self.plans,
        }


def asks_for_batch(words: Sequence[str]) -> bool:
    """Whether a command line leaves the size of a step to the runner."""
    return MAX in [word.lstrip("+") for word in words]


def largest(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest number up to ``most`` that fits, if all below one that fits do; 0: none.

    Args:
        fits: whether a number fits; it is asked for few, those near the guess first.
        guess: where to begin.
        most: the largest number there is.
    """
    guess, step = min(max(guess, 1), most), 1
    if fits(guess):
        low, high = guess, most + 1
        while low < most:
            at = min(low + step, most)
            if not fits(at):
                high = at
                break
            low, step = at, 2 * step
    else:
        low, high = 0, guess
        while high > 1:
            at = max(high - step, 1)
            if fits(at):
                low = at
                break
            high, step = at, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(words: Sequence[str], progress: Callable[[str], None] = lambda line: None) -> LargestBatch:
    """Find the largest batch of a request.

    Args:
        words: the command line, with ``data.batch_size=max``.
        progress: is told what is done.

    Raises:
        RequestError: the request has problems, or its samples have sizes of their own.
        DoesNotFitError: not even one sample in each micro-batch fits.
    """
    rest = [word for word in words if word.lstrip("+") != MAX]
    trials = _Layouts(rest, progress) if asks_for_layout(rest) else _Plans(rest, progress)
    trials.most = min(_MOST, _all_samples(trials.config) // trials.unit) or 1
    found = largest(trials.fits, trials.guess(), trials.most)
    if not found:
        peak, limit = trials.known[1]
        told = f"{MAX}: even {trials.unit} samples, one in each micro-batch, need {format_bytes(peak)}"
        helps = f"`runner plan {_KEY}={trials.unit}` with the other words says what would help"
        raise DoesNotFitError(f"{told} of {format_bytes(limit)}. {helps}.")
    after = trials.known.get(found + 1)
    return LargestBatch(
        tuple(trials.words(found)),
        found * trials.unit,
        found,
        trials.unit,
        *trials.known[found],
        (found + 1) * trials.unit if after is not None else None,
        after[0] if after is not None else None,
        len(trials.known),
    )


class _Trials:
    """Sizes that were planned: the samples of a micro-batch with the fullest rank's bytes, and its limit."""

    def __init__(self, words: Sequence[str], progress: Callable[[str], None]) -> None:
        self._words, self._progress = list(words), progress
        self.known: dict[int, tuple[int, int]] = {}
        self.most = 1
        self.unit = 1

    def words(self, samples: int) -> list[str]:
        """The request with so many samples in a micro-batch."""
        return [*self._words, f"{_KEY}={samples * self.unit}"]

    def fits(self, samples: int) -> bool:
        """Whether so many samples fit."""
        if samples not in self.known:
            self._progress(f"planning a batch of {samples * self.unit:,} ...")
            self.known[samples] = self._planned(samples)
        peak, limit = self.known[samples]
        return peak <= limit

    def _planned(self, samples: int) -> tuple[int, int]:
        raise NotImplementedError

    def guess(self) -> int:
        """About how many samples fit."""
        raise NotImplementedError


class _Plans(_Trials):
    """Plans of the request's own layout."""

    def __init__(self, words: Sequence[str], progress: Callable[[str], None]) -> None:
        super().__init__(words, progress)
        self.config = resolve_request([*words, f"{_KEY}=1"])
        if self.config.schedule.option("shares") is not None:
            why = "It looks for as many samples as each micro-batch may have, and here they have unequal shares"
            fix = "schedule.shares=null"
            raise RequestError([Problem(_KEY, "max", "must be a number with schedule.shares", why, fix)])
        self.unit = self.config.parallelism.data * self.config.schedule.computed_microbatches
        self._check(self._config(1))
        self._profiles: dict[int, Any] = {}

    @staticmethod
    def _check(config: RunConfig) -> None:
        raise_problems([*rules(config), *schedule_problems(config)])

    def _config(self, samples: int) -> RunConfig:
        made = copy.deepcopy(self.config)
        made.data.batch_size = samples * self.unit
        return made

    def _planned(self, samples: int) -> tuple[int, int]:
        from runner.launch.run.machines import this_machine
        from runner.launch.run.measured_plan import measured_plan

        config = self._config(samples)
        here = this_machine(config)
        plan = measured_plan(
            config,
            self._profile(config, samples),
            device_memory_bytes=here.device_memory_bytes,
            cores=here.cores,
            memory_bytes=here.memory_bytes,
            compare=False,
        )
        return _peak(plan)

    def _profile(self, config: RunConfig, samples: int) -> Any:
        """The profile of a size; measured ones are taken of two small ones, because large batches take long."""
        from runner.plan.planners.problem import interpolated
        from runner.profiling.model import profile_model

        few = [self._profiles[each] for each in (1, _SECOND) if each in self._profiles]
        if len(few) == 2 and few[0].seconds_source == "measured":
            return interpolated(few, samples)
        self._profiles[samples] = profile_model(config)
        return self._profiles[samples]

    def guess(self) -> int:
        if not self.fits(1):
            return 1
        near, far = 1, min(_SECOND, self.most)
        for _ in range(3):  # each line through the last two sizes ends nearer
            self.fits(far)
            (less, limit), (more, _limit) = self.known[near], self.known[far]
            found = far + (limit - more) * (far - near) // (more - less) if more != less else far
            found = min(max(found, 1), self.most)
            if found in self.known:
                return found
            near, far = far, found
        return far


class _Layouts(_Trials):
    """Searches of ``parallelism=auto``, which keep the number of micro-batches."""

    def __init__(self, words: Sequence[str], progress: Callable[[str], None]) -> None:
        super().__init__(words, progress)
        self.config = resolve_with_layers([*words, f"{_KEY}=1"])[0]
        microbatches = self.config.schedule.microbatches
        if not any(word.lstrip("+").startswith("schedule.microbatches=") for word in words):
            self._words.append(f"schedule.microbatches={microbatches}")
        self.unit = microbatches * ranks_to_share(self.config)
        self._problem: PlanningProblem | None = None

    def _planned(self, samples: int) -> tuple[int, int]:
        found = find_layout(self.words(samples), self._progress)
        self._problem = self._problem or found.problem
        return _peak(found.chosen.best.plan)

    def guess(self) -> int:
        from runner.plan.planners.joint import EFFORTS, JointSearch

        if not self.fits(1) or self._problem is None:
            return 1
        problem = self._problem

        def fits(samples: int) -> bool:
            found = JointSearch(replace(problem, batch=samples * self.unit), EFFORTS["quick"]).run().answers
            return any((each.peak_bytes or 0.0) <= problem.memory[each.world_size] for each in found)

        return largest(fits, 1, self.most)


def _peak(plan: RunPlan) -> tuple[int, int]:
    return plan.peak_memory_bytes[plan.fullest], plan.limit_of(plan.fullest)


def _all_samples(config: RunConfig) -> int:
    """How many samples the training data has; many if it does not say.

    Raises:
        RequestError: they have sizes of their own, so that memory depends on which come together.
    """
    from runner.model.data import load_datasets

    data = load_datasets(config.data, config.seed).train
    shapes = set[str]()
    for _, sample in zip(range(_LOOKED_AT), data, strict=False):
        shapes.add(_shapes(sample))
    if len(shapes) > 1:
        rule = "belongs to data whose samples all have the same size"
        why = f"Of its first {_LOOKED_AT} samples some differ in size, so memory depends on which come together"
        raise RequestError([Problem(_KEY, "max", rule, why, f"{_KEY}=32")])
    return len(data) if hasattr(data, "__len__") else _MOST


def _shapes(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return str({key: _shapes(each) for key, each in sample.items()})
    if isinstance(sample, tuple | list):
        return str([_shapes(each) for each in sample])
    return str(tuple(sample.shape)) if hasattr(sample, "shape") else type(sample).__name__
