"""What the rows of :mod:`runner.config.rules.zero_table` are made of: sources, and questions to a request."""

from __future__ import annotations

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import find_optimizer

__all__ = ["CONFIG", "OFFLOAD", "STAGE_12", "STAGE_3", "has_16_bit_states", "offloads", "shares", "updated_in_host"]

STAGE_12, STAGE_3 = "deepspeed/runtime/zero/stage_1_and_2.py", "deepspeed/runtime/zero/stage3.py"
OFFLOAD = "deepspeed/runtime/zero/offload_config.py"
CONFIG = "deepspeed/runtime/zero/config.py"


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


def updated_in_host(config: RunConfig) -> bool:
    """The optimizer's states and its update are the host's alone."""
    kind = find_optimizer(config.optimizer)
    return kind is not None and kind.place == "host"
