"""The additions of ``runner plan --why`` to a plan: reasons, rules that the request touches, DeepSpeed's settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.config.deepspeed import deepspeed_settings
from runner.config.schema import RunConfig
from runner.config.units import format_bytes
from runner.model.device import device_type
from runner.plan.rules.asked import AskedRule, rules_that_asked
from runner.plan.rules.zero import shares_by_itself
from runner.plan.values import RunPlan

__all__ = ["Why", "why_of"]


@dataclass(frozen=True, slots=True)
class Why:
    """The reasons why a plan is as it is.

    Args:
        named: keys and groups that the request names.
        layout: why the layout, the stages and the schedule are as they are.
        reasons: the plan's own notes, which its table prints.
        rules: the rules that connect named keys with other keys; all of them hold.
        deepspeed: the derived DeepSpeed configuration; None if DeepSpeed is not used.
    """

    named: tuple[str, ...]
    layout: tuple[str, ...]
    reasons: tuple[str, ...]
    rules: tuple[AskedRule, ...]
    deepspeed: dict[str, Any] | None

    def lines(self) -> Iterator[str]:
        """The text form, printed below the plan."""
        yield "why this layout:"
        yield from (f"  {line}" for line in self.layout)
        named = ", ".join(self.named) if self.named else "nothing that the request names"
        yield f"{len(self.rules)} rules bind {named}; all of them hold (`runner plan --rules` prints every rule)"
        yield from (f"  {rule.line()}" for rule in self.rules)
        if self.deepspeed is not None:
            yield f"DeepSpeed's configuration: {json.dumps(self.deepspeed, indent=2)}"

    def to_json(self) -> dict[str, Any]:
        """The JSON form, for scripts."""
        rules = [rule.to_json() for rule in self.rules]
        return {"layout": list(self.layout), "reasons": list(self.reasons), "rules": rules, "deepspeed": self.deepspeed}


def why_of(plan: RunPlan, config: RunConfig, overrides: Sequence[str]) -> Why:
    """Collect the reasons why the plan of a request is as it is.

    Args:
        plan: the plan of the request.
        config: the request.
        overrides: the overrides from which the request was made.
    """
    named = tuple(dict.fromkeys(word.partition("=")[0].lstrip("+~") for word in overrides))
    return Why(
        named=named,
        layout=tuple(_layout(plan, config, named)),
        reasons=plan.advice,
        rules=tuple(rules_that_asked(config, named, plan.schedule, plan.profile)),
        deepspeed=_deepspeed(plan, config),
    )


def _layout(plan: RunPlan, config: RunConfig, named: Sequence[str]) -> Iterator[str]:
    """Yield who chose the degrees, the schedule and the cut, and what speaks for them."""
    degrees, schedule = config.parallelism, config.schedule
    choices = (
        (f"pipeline {degrees.pipeline} x data {degrees.data} x tensor {degrees.tensor}", "parallelism"),
        (f"schedule={schedule.name}", "schedule"),
        (f"schedule.microbatches={schedule.microbatches}", "schedule.microbatches"),
        (f"partition={config.partition.name}", "partition"),
    )
    asked = [what for what, key in choices if _names(named, key)]
    given = [what for what, key in choices if not _names(named, key)]
    for chosen, by in ((asked, "named by the request"), (given, "not named: the default, or the recipe's")):
        if chosen:
            yield f"{by}: {', '.join(chosen)}"
    rank = plan.fullest
    peak, limit = format_bytes(plan.peak_memory_bytes[rank]), format_bytes(plan.limit_of(rank))
    yield f"the fullest rank has {peak} of {limit}, {'which fits' if plan.fits else 'which does not fit'}"
    yield from plan.reasons


def _names(named: Sequence[str], key: str) -> bool:
    return any(word == key or (key == "parallelism" and word.startswith("parallelism.")) for word in named)


def _deepspeed(plan: RunPlan, config: RunConfig) -> dict[str, Any] | None:
    if config.zero.stage is None or shares_by_itself(config, plan.schedule):
        return None
    return deepspeed_settings(config, accelerated=device_type(config) == "cuda")
