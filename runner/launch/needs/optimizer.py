"""Requirements of an optimizer on the machine, checked before anything starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.optim.catalogue.registry import find_optimizer
from runner.optim.operators import has_ninja

__all__ = ["optimizer_needs"]


def optimizer_needs(config: RunConfig) -> Iterator[Problem]:
    """Requirements of the optimizer that this machine does not meet."""
    name, kind = config.optimizer.name, find_optimizer(config.optimizer)
    if kind is None:
        return
    if kind.package is not None and importlib.util.find_spec(kind.package) is None:
        install = f"'runner[{kind.extra}]'" if kind.extra is not None else kind.package
        why = f"It is {kind.package}'s, which is not installed: pip install {install}"
        yield Problem("optimizer.name", name, "must be another on this machine", why, "optimizer=adamw")
    elif kind.operator is not None and not has_ninja():
        why = f"DeepSpeed compiles its operator {kind.operator} with ninja, which is not found: pip install ninja"
        yield Problem("optimizer.name", name, "must be another on this machine", why, "optimizer=adamw")
