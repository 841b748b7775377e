"""Rules of ``trainer`` and ``checkpoint``: steps, clipping, averages and files."""

from __future__ import annotations

import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator

from runner.config.rules.table import Computed, Row, Table
from runner.config.rules.values import TARGET, at_least, is_given, one_of, positive
from runner.config.schema import RunConfig
from runner.errors import Problem

__all__ = ["CHECKPOINT", "TRAINER", "may_be_called"]

_OF_STANDARD_LIBRARY = "It is of Python's standard library"
_OF_PYTHON_2 = {module.split(".")[0] for module in (*IMPORT_MAPPING, *(module for module, _ in NAME_MAPPING))}
"""Its modules by the names that pickle gives them in protocol 2, which torch.save uses."""
_ON_NONFINITE = ("stop", "skip")

TRAINER: Table[RunConfig] = Table(
    "Trainer",
    (
        at_least("trainer.max_steps", 1),
        at_least("trainer.max_epochs", 1),
        at_least("trainer.val_every", 1),
        at_least("trainer.log_every", 1),
        at_least("trainer.threads", 1),
        positive("trainer.grad_clip_norm", "1.0"),
        positive("trainer.grad_clip_value", "1.0"),
        Row(
            "trainer.grad_clip_value",
            lambda c: is_given(c, "trainer.grad_clip_norm") and is_given(c, "trainer.grad_clip_value"),
            "must be null beside a largest norm",
            "Gradients are clipped by one rule, and trainer.grad_clip_norm = {trainer.grad_clip_norm}",
            fix="trainer.grad_clip_value=null",
        ),
        one_of("trainer.on_nonfinite", _ON_NONFINITE),
        Row(
            "trainer.ema_decay",
            lambda c: c.trainer.ema_decay is not None and not 0 < c.trainer.ema_decay < 1,
            "must lie in (0, 1)",
            fix="trainer.ema_decay=0.999",
        ),
    ),
)


def may_be_called(name: str) -> bool:
    """Whether a user may allow a file to call what ``package.module:name`` names.

    Nothing of Python's standard library may be called: eval, os.system and their like do whatever a file wants.
    """
    package = name.split(":")[0].split(".")[0]
    return TARGET.fullmatch(name) is not None and package not in sys.stdlib_module_names and package not in _OF_PYTHON_2


def _pickled_names(config: RunConfig) -> Iterator[Problem]:
    for name in config.checkpoint.allow_pickle:
        if TARGET.fullmatch(name) is None:
            rule = "each must be package.module:name of a class or function"
            yield Problem("checkpoint.allow_pickle", name, rule, fix="checkpoint.allow_pickle=[]")
        elif not may_be_called(name):
            why = f"{_OF_STANDARD_LIBRARY}, and eval or os.system do whatever a file wants"
            yield Problem("checkpoint.allow_pickle", name, "cannot be allowed", why, "checkpoint.allow_pickle=[]")


CHECKPOINT: Table[RunConfig] = Table(
    "Checkpoints",
    (
        at_least("checkpoint.every", 1),
        at_least("checkpoint.keep", 1),
        positive("checkpoint.every_seconds", "900"),
        positive("checkpoint.timeout_seconds", "3600"),
        at_least("checkpoint.keep_best", 0),
        Row(
            "checkpoint.keep_best",
            lambda c: c.checkpoint.keep_best > 0 and not is_given(c, "trainer.val_every"),
            "must be 0 without trainer.val_every",
            "Checkpoints are compared by the validation at their step, and there is one at the end only",
            fix="trainer.val_every=100",
        ),
        Computed(
            "checkpoint.allow_pickle",
            _pickled_names,
            "each must be package.module:name of a class or function that is not of Python's standard library",
            "eval or os.system do whatever a file wants",
        ),
    ),
)
