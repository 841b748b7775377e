"""Rules of ``kernels``: its keys, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.precision import PRECISIONS
from runner.config.rules.table import Computed, Row, Table
from runner.config.schema import SUBSTITUTIONS, RunConfig
from runner.errors import Problem, did_you_mean
from runner.optim.catalogue.registry import find_optimizer

__all__ = ["KERNEL_TABLES"]

_SWITCHES = ("attention", "norm", "elementwise", "loss")
_MEANS = ("eager", "fused")
_TRACED = ("fused", "liger")
_KNOWN = f"must be some of {', '.join(SUBSTITUTIONS)}"


def _is_any_given(config: RunConfig) -> bool:
    return bool(config.kernels.substitutions) or any(getattr(config.kernels, each) is not None for each in _SWITCHES)


def _runs_traces(config: RunConfig) -> bool:
    fuses = any(getattr(config.kernels, switch) in _TRACED for switch in _SWITCHES[1:])
    return fuses or bool(config.kernels.substitutions)


def _unknown(config: RunConfig) -> Iterator[Problem]:
    names = config.kernels.substitutions
    meant = [name if name in SUBSTITUTIONS else did_you_mean(name, SUBSTITUTIONS) for name in names]
    known = ",".join(dict.fromkeys(filter(None, meant)))
    for name in names:
        if name not in SUBSTITUTIONS:
            fix = f"kernels.substitutions=[{known}]" if known else "kernels=substituted"
            yield Problem("kernels.substitutions", name, _KNOWN, fix=fix)


def _autocasts(config: RunConfig) -> bool:
    precision = PRECISIONS.get(config.precision.name)
    return precision is not None and precision.autocast is not None


def _watches(config: RunConfig) -> bool:
    kind = find_optimizer(config.optimizer)
    return kind is not None and kind.watch is not None


def _keys() -> Iterator[Row[RunConfig]]:
    for switch in _SWITCHES:
        path, means = f"kernels.{switch}", _MEANS if switch == "attention" else (*_MEANS, "liger")
        yield Row(
            path,
            lambda c, switch=switch, means=means: getattr(c.kernels, switch) not in (None, *means),  # type: ignore[misc]
            f"must be null or one of {', '.join(means)}",
            fix=f"{path}=fused",
        )


_OWN = "Layers run the operators of their trace then"

KERNEL_TABLES: tuple[Table[RunConfig], ...] = (
    Table(
        "Kernels",
        (
            *_keys(),
            Computed("kernels.substitutions", _unknown, _KNOWN),
            Row(
                "compile",
                lambda c: c.compile,
                "must be false with kernels={kernels.name} or one of its switches",
                "A compiled layer chooses its operators itself",
                fix="compile=false",
                when=_is_any_given,
            ),
        ),
    ),
    Table(
        "Fused norms, chains or losses, and substitutions",
        (
            Row(
                "precision.name",
                _autocasts,
                "must be another with kernels.norm, .elementwise, .loss or .substitutions",
                "Autocast chooses formats operator by operator, and would meet one operator for several",
                fix="precision=bf16 or kernels=none",
            ),
            Row(
                "approximate_backward.name",
                lambda c: c.approximate_backward.name != "none",
                "must be none with kernels.norm, .elementwise, .loss or .substitutions",
                "Its functions are recognised one by one, and would be inside of an operator",
                fix="approximate_backward=none",
            ),
            Row(
                "optimizer.name",
                _watches,
                "must be another with kernels.norm, .elementwise, .loss or .substitutions",
                f"{_OWN}, which call no modules for it to watch",
                fix="optimizer=adamw",
            ),
            Row(
                "zero.stage",
                lambda c: c.zero.stage == 3,
                "must be less than 3 with kernels.norm, .elementwise, .loss or .substitutions",
                f"{_OWN}, which call no modules for DeepSpeed to gather their weights",
                fix="zero.stage=2",
            ),
        ),
        applies=_runs_traces,
    ),
)
"""All tables of this file, in the order in which they are checked."""
