"""The additions of ``runner plan --why`` to a plan: reasons, rules that the request touches, DeepSpeed's settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.config.deepspeed import deepspeed_settings
from runner.config.schema import RunConfig
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
        reasons: the plan's own notes, which its table prints.
        rules: the rules that connect named keys with other keys; all of them hold.
        deepspeed: the derived DeepSpeed configuration; None if DeepSpeed is not used.
    """

    named: tuple[str, ...]
    reasons: tuple[str, ...]
    rules: tuple[AskedRule, ...]
    deepspeed: dict[str, Any] | None

    def lines(self) -> Iterator[str]:
        """The text form, printed below the plan."""
        named = ", ".join(self.named) if self.named else "nothing that the request names"
        yield f"{len(self.rules)} rules bind {named}; all of them hold (`runner plan --rules` prints every rule)"
        yield from (f"  {rule.line()}" for rule in self.rules)
        if self.deepspeed is not None:
            yield f"DeepSpeed's configuration: {json.dumps(self.deepspeed, indent=2)}"

    def to_json(self) -> dict[str, Any]:
        """The JSON form, for scripts."""
        rules = [rule.to_json() for rule in self.rules]
        return {"reasons": list(self.reasons), "rules": rules, "deepspeed": self.deepspeed}


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
        reasons=plan.advice,
        rules=tuple(rules_that_asked(config, named, plan.schedule, plan.profile)),
        deepspeed=_deepspeed(plan, config),
    )


def _deepspeed(plan: RunPlan, config: RunConfig) -> dict[str, Any] | None:
    if config.zero.stage is None or shares_by_itself(config, plan.schedule):
        return None
    return deepspeed_settings(config, accelerated=device_type(config) == "cuda")
