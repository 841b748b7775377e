"""Plans what a search of layouts has found as the requests that a user would type."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runner.config.free_keys import held_keys
from runner.config.rules.sections import rules
from runner.config.schema import PlannerConfig, RunConfig
from runner.errors import RequestError, raise_problems
from runner.plan.layout.batches import largest_microbatch
from runner.plan.requested_schedule import resolve_request, schedule_problems
from runner.plan.search.trials import changed_by

if TYPE_CHECKING:
    from runner.plan.draft.draft import Machine
    from runner.plan.planners.joint import Family
    from runner.plan.planners.problem import ProfiledSizes
    from runner.plan.planners.values import PlanningAnswer
    from runner.plan.values import RunPlan
    from runner.profile import ModelProfile

__all__ = ["LayoutJudge", "without_search"]

_SEARCH_KEYS = ("parallelism", "parallelism.ranks", "parallelism.free", "parallelism.search", "planner")
_OF_PARTS = (
    "parallelism.sharding",
    "parallelism.sequence",
    "parallelism.loss",
    "parallelism.tensor_sums",
    "parallelism.batch_sliced",
)  # what only divided layers are asked with
_PLAIN = ("naive", "gpipe", "1f1b")  # what one stage may be asked for with


def _is_of_search(key: str) -> bool:
    return key in _SEARCH_KEYS or key.startswith("planner.")


def without_search(config: RunConfig) -> RunConfig:
    """The request, which is changed, without the keys of a search."""
    config.parallelism = replace(config.parallelism, name="single", ranks=None, free=None)
    config.planner = PlannerConfig()
    return config


class LayoutJudge:
    """Plans answers as the requests that a user would type for them."""

    def __init__(self, words: Sequence[str], config: RunConfig, sizes: ProfiledSizes, machine: Machine) -> None:
        named = {word.lstrip("+~").partition("=")[0] for word in words}
        self._words = [word for word in words if not _is_of_search(word.lstrip("+~").partition("=")[0])]
        self._config, self._sizes, self._machine = config, sizes, machine
        self._named = named
        self._refused: dict[tuple[object, ...], bool] = {}

    def leaves_open(self, key: str) -> bool:
        """Whether a search may choose the key's value."""
        return key not in self._named

    def keys(self, answer: PlanningAnswer) -> dict[str, Any]:
        """The keys that ask for an answer, without those that the request has already."""
        from runner.schedule.catalogue.registry import SPECS

        config, chunks = self._config, {name: spec.default_chunks for name, spec in SPECS.items()}
        keys = answer.overrides(chunks)
        if answer.order is None and config.schedule.name not in _PLAIN:
            keys["schedule"] = "1f1b"
        asked = config.parallelism.free is not None  # what is named as free is told, also where it stays
        if keys["zero.stage"] is None and config.zero.stage is None and not asked:
            del keys["zero.stage"]
        unchanged = "asked" if asked else config.activation_checkpoint.name
        if keys["activation_checkpoint"] in ("asked", unchanged):
            del keys["activation_checkpoint"]
        held = held_keys(config.parallelism.free)
        return {key: value for key, value in keys.items() if key not in self._named and key not in held}

    def spelled(self, keys: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys as words."""
        return tuple(f"{key}={_spelled(value)}" for key, value in keys.items())

    def words(self, keys: Mapping[str, Any]) -> list[str]:
        """The whole request as words."""
        whole = keys.get("parallelism.tensor", self._config.parallelism.tensor) == 1
        asked = [word for word in self._words if not (whole and word.lstrip("+").startswith(_OF_PARTS))]
        return [*asked, *self.spelled(keys)]

    def plan(self, keys: Mapping[str, Any]) -> RunPlan:
        """The plan of the request with these keys, by seconds between those of the profiled sizes."""
        from runner.plan.planners.problem import interpolated
        from runner.plan.planners.ways import SAVED_OPS

        config = changed_by(without_search(copy.deepcopy(self._config)), keys)
        if config.parallelism.tensor == 1:
            config.parallelism = replace(
                config.parallelism, sharding=None, sequence=False, loss="auto", tensor_sums="auto", batch_sliced=None
            )
        checkpointing = config.activation_checkpoint
        if checkpointing.name == "selective" and not checkpointing.given:
            setattr(checkpointing, "save_ops", SAVED_OPS)  # noqa: B010 - a key of strategies, which types do not know
        degrees, sizes = config.parallelism, self._sizes
        samples = largest_microbatch(config.data.batch_size, degrees.data, config.schedule.parts)
        known = degrees.tensor in sizes and config.precision == self._config.precision
        return self._plan(config, interpolated(sizes[degrees.tensor], samples) if known else None)

    def typed(self, keys: Mapping[str, Any]) -> RunPlan:
        """The plan of the request as its words ask for it."""
        return self._plan(resolve_request(self.words(keys)))

    def _plan(self, config: RunConfig, profile: ModelProfile | None = None) -> RunPlan:
        from runner.launch.run.measured_plan import measured_plan

        raise_problems([*rules(config), *schedule_problems(config)])
        here = self._machine
        return measured_plan(
            config,
            profile,
            device_memory_bytes=here.device_memory_bytes,
            cores=here.cores,
            memory_bytes=here.memory_bytes,
            compare=False,
        )

    def refuses(self, family: Family) -> bool:
        """Whether a rule forbids a layout with an order and ZeRO; the cut is even, and everything is kept."""
        kind = family.pipeline, family.data > 1, family.tensor, family.order, family.zero, family.in_host
        if kind not in self._refused:
            self._refused[kind] = self._is_refused(family)
        return self._refused[kind]

    def _is_refused(self, family: Family) -> bool:
        from runner.plan.make import plan_problems
        from runner.plan.planners.problem import alone

        config = without_search(alone(self._config, family.tensor))
        degrees = config.parallelism
        degrees.pipeline, degrees.data, degrees.tensor = family.pipeline, family.data, family.tensor
        config.schedule.microbatches, config.zero.stage = _fewest_alike(config, family), family.zero
        config.partition.name, config.partition.boundaries = "uniform", None
        if family.in_host:
            config.offload.optimizer = "cpu"
        if family.order is not None:
            config.schedule.name, config.schedule.chunks = family.order.schedule, family.order.chunks
        stages = family.pipeline * (family.order.chunks if family.order is not None else 1)
        try:
            return bool([*rules(config), *plan_problems(config, max(stages, 2))])
        except RequestError:
            return True


def _fewest_alike(config: RunConfig, family: Family) -> int:
    """Fewer micro-batches, about which the rules say the same: an order of two for each rank is made in no time."""
    from runner.plan.planners.joint import divisors
    from runner.plan.planners.orders import exists

    if family.order is None or config.data.batch_size % (family.data * family.microbatches):
        return family.microbatches
    enough = (each for each in divisors(family.microbatches) if each >= 2 * family.pipeline)
    return next((each for each in enough if exists(family.order, family.pipeline, each)), family.microbatches)


def _spelled(value: object) -> str:
    if value is None:
        return "null"
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
