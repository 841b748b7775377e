"""Rules of ``lr_scheduler``: the learning rate as a function of the step."""

from __future__ import annotations

from runner.config.own_rate import own_rate_problems
from runner.config.rules.table import Computed, Row, Table, where
from runner.config.rules.values import at_least, belongs, is_given, not_negative, of_own, optional_target
from runner.config.schema import LrSchedulerConfig, RunConfig

__all__ = ["LEARNING_RATE"]

_DEFAULT = LrSchedulerConfig()


def _changes(config: RunConfig) -> bool:
    return config.lr_scheduler.name != "constant"


def _of_change(key: str) -> Row[RunConfig]:
    """The rule that a key which has no meaning for a constant rate is not set."""
    return belongs(
        f"lr_scheduler.{key}",
        "a schedule that changes the rate",
        "The constant schedule keeps optimizer.lr at every step",
        fix="lr_scheduler=linear",
        when=lambda c: not _changes(c),
    )


def _warms_up_within(config: RunConfig, total: int | None) -> bool:
    return total is None or total < 1 or config.lr_scheduler.warmup_steps <= total


LEARNING_RATE: Table[RunConfig] = Table(
    "Learning rate",
    (
        at_least("lr_scheduler.warmup_steps", 0),
        at_least("lr_scheduler.total_steps", 1),
        not_negative("lr_scheduler.min_lr"),
        at_least("lr_scheduler.base_batch", 1),
        _of_change("warmup_steps"),
        _of_change("min_lr"),
        _of_change("total_steps"),
        *optional_target("lr_scheduler.target"),
        *of_own("lr_scheduler", "a learning rate", ("constant", "linear", "cosine", "warmup_decay")),
        *(
            belongs(
                f"lr_scheduler.{key}",
                "a learning rate of the runner's",
                "Your function decides the rate of every step, and has lr_scheduler.kwargs",
                fix=f"lr_scheduler.{key}={getattr(_DEFAULT, key)}",
                when=lambda c: c.lr_scheduler.target is not None,
            )
            for key in ("warmup_steps", "min_lr")
        ),
        Computed(
            "lr_scheduler.target",
            own_rate_problems,
            "must name a function of step, total_steps, peak and lr_scheduler.kwargs that returns a rate",
        ),
        *where(
            _changes,
            Row(
                "lr_scheduler.warmup_steps",
                lambda c: not _warms_up_within(c, c.lr_scheduler.total_steps),
                "must be at most {lr_scheduler.total_steps}",
                "The decay ends at step {lr_scheduler.total_steps} (lr_scheduler.total_steps)",
                fix="lr_scheduler.warmup_steps={lr_scheduler.total_steps}",
                when=lambda c: is_given(c, "lr_scheduler.total_steps"),
            ),
            Row(
                "lr_scheduler.warmup_steps",
                lambda c: not _warms_up_within(c, c.trainer.max_steps),
                "must be at most {trainer.max_steps}",
                "The decay ends at step {trainer.max_steps} (trainer.max_steps)",
                fix="lr_scheduler.warmup_steps={trainer.max_steps}",
                when=lambda c: not (is_given(c, "lr_scheduler.total_steps") or is_given(c, "trainer.max_epochs")),
            ),
            Row(
                "lr_scheduler.min_lr",
                lambda c: c.lr_scheduler.min_lr > c.optimizer.lr > 0,
                "must be at most optimizer.lr",
                "The rate falls from optimizer.lr = {optimizer.lr}",
                fix="lr_scheduler.min_lr=0",
                when=lambda c: not is_given(c, "lr_scheduler.base_batch"),
            ),
        ),
    ),
)
