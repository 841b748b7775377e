"""All rules of the configuration, which need no schedule, no model and no machine.

Rules that need a schedule or a topology belong to the plan, see :mod:`runner.plan.rules.tables`.
"""

from __future__ import annotations

from runner.config.rules.adapter import ADAPTER_TABLES
from runner.config.rules.approximations import APPROXIMATION_TABLES
from runner.config.rules.compression import COMPRESSION_TABLES
from runner.config.rules.devices import DEVICE_TABLES
from runner.config.rules.embedding import EMBEDDING_TABLES
from runner.config.rules.kernels import KERNEL_TABLES
from runner.config.rules.launcher import LAUNCHER_TABLES
from runner.config.rules.learning_rate import LEARNING_RATE
from runner.config.rules.machine import MACHINE
from runner.config.rules.memory import MEMORY
from runner.config.rules.migration import MIGRATION_TABLES
from runner.config.rules.optimizer import OPTIMIZER_TABLES
from runner.config.rules.precision import PRECISION_TABLES
from runner.config.rules.request import KNOWN_NAMES, REQUEST_TABLES
from runner.config.rules.table import Table
from runner.config.rules.tensor import TENSOR_TABLES
from runner.config.rules.trainer import CHECKPOINT, TRAINER, may_be_called
from runner.config.rules.weights import WEIGHTS
from runner.config.rules.zero_table import DEEPSPEED_FILE, ZERO
from runner.config.schema import RunConfig
from runner.errors import Problem

__all__ = ["CONFIG_TABLES", "KNOWN_NAMES", "may_be_called", "rules"]

CONFIG_TABLES: tuple[Table[RunConfig], ...] = (
    *REQUEST_TABLES,
    *MIGRATION_TABLES,
    *ADAPTER_TABLES,
    *EMBEDDING_TABLES,
    *TENSOR_TABLES,
    MEMORY,
    WEIGHTS,
    ZERO,
    DEEPSPEED_FILE,
    *OPTIMIZER_TABLES,
    *COMPRESSION_TABLES,
    *APPROXIMATION_TABLES,
    *KERNEL_TABLES,
    LEARNING_RATE,
    *PRECISION_TABLES,
    TRAINER,
    CHECKPOINT,
    MACHINE,
    *DEVICE_TABLES,
    *LAUNCHER_TABLES,
)
"""The tables in the order in which they are checked and reported."""


def rules(config: RunConfig) -> list[Problem]:
    """Every rule that ``config`` breaks, in the order of the tables."""
    return [problem for table in CONFIG_TABLES for problem in table.problems(config)]
