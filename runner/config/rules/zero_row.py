"""One row of :mod:`runner.config.rules.zero_table`, and what rows are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.errors import Problem

__all__ = [
    "CONFIG", "OFFLOAD", "OWN", "STAGE_12", "STAGE_3", "Row", "has_16_bit_states", "offloads", "shares",
]  # fmt: skip

OWN = "the runner"
STAGE_12, STAGE_3 = "deepspeed/runtime/zero/stage_1_and_2.py", "deepspeed/runtime/zero/stage3.py"
OFFLOAD = "deepspeed/runtime/zero/offload_config.py"
CONFIG = "deepspeed/runtime/zero/config.py"


@dataclass(frozen=True, slots=True)
class Row:
    """One rule.

    Args:
        path: the key that is refused.
        breaks: whether a request breaks the rule.
        rule: what must hold.
        why: the reason.
        source: where it stands.
        fix: an override that would do.
    """

    path: str
    breaks: Callable[[RunConfig], bool]
    rule: str
    why: str
    source: str
    fix: str

    def problem(self, config: RunConfig) -> Problem:
        return Problem(self.path, _value(config, self.path), self.rule, f"{self.why} ({self.source})", self.fix)


def shares(config: RunConfig) -> bool:
    """ZeRO 1, 2 or 3."""
    return bool(config.zero.stage)


def offloads(config: RunConfig) -> bool:
    """Optimizer states leave the device."""
    return config.offload.optimizer != "none"


def has_16_bit_states(config: RunConfig) -> bool:
    """Weights and states have 16 bits, and there are no masters."""
    precision = PRECISIONS.get(config.precision.name)
    return precision is not None and precision.weights != "float32" and not precision.master_weights


def _value(config: RunConfig, path: str) -> object:
    value: object = config
    for key in path.split("."):
        value = getattr(value, key)
    return value
