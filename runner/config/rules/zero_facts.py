"""Sources and conditions that the rows of :mod:`runner.config.rules.zero_table` use."""

from __future__ import annotations

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import find_optimizer

__all__ = ["CONFIG", "OFFLOAD", "STAGE_12", "STAGE_3", "has_16_bit_states", "offloads", "shares", "updated_in_host"]

STAGE_12, STAGE_3 = "deepspeed/runtime/zero/stage_1_and_2.py", "deepspeed/runtime/zero/stage3.py"
OFFLOAD = "deepspeed/runtime/zero/offload_config.py"
CONFIG = "deepspeed/runtime/zero/config.py"


def shares(config: RunConfig) -> bool:
    """Whether ZeRO 1, 2 or 3 is used."""
    return bool(config.zero.stage)


def offloads(config: RunConfig) -> bool:
    """Whether optimizer states leave the device."""
    return config.offload.optimizer != "none"


def has_16_bit_states(config: RunConfig) -> bool:
    """Whether weights and states have 16 bits, without master weights."""
    precision = PRECISIONS.get(config.precision.name)
    return precision is not None and precision.weights != "float32" and not precision.master_weights


def updated_in_host(config: RunConfig) -> bool:
    """Whether the optimizer's states and its update can only be on the host."""
    kind = find_optimizer(config.optimizer)
    return kind is not None and kind.place == "host"
