"""Rules of the optimizer: keys that mean nothing to it, what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from runner.config.optimizers import OPTIMIZERS, OptimizerKind
from runner.config.rules.table import Row, Table, value_at, where
from runner.config.rules.values import at_least, is_given, not_negative, positive
from runner.config.schema import OptimizerConfig, RunConfig

__all__ = ["OPTIMIZER_TABLES"]

_LAMB_WARM_UP = 10  # steps: 1 / (1 - 0.9), the running mean's; runner/optim/kinds/onebit_lamb.py
_DEFAULT = OptimizerConfig()


def _is_known(config: RunConfig) -> bool:
    return config.optimizer.name in OPTIMIZERS


def _kind(config: RunConfig) -> OptimizerKind:
    return OPTIMIZERS[config.optimizer.name]


def _compresses(config: RunConfig) -> bool:
    return _kind(config).compresses


def _is_custom(config: RunConfig) -> bool:
    return config.optimizer.name == "custom"


def _is_kfac(config: RunConfig) -> bool:
    return _kind(config).curvature


_NUMBERS: Table[RunConfig] = Table(
    "Optimizer",
    (
        positive("optimizer.lr", "0.001"),
        positive("optimizer.eps", "1e-8"),
        not_negative("optimizer.weight_decay"),
        Row(
            "optimizer.betas",
            lambda c: len(c.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in c.optimizer.betas),
            "must be two numbers in [0, 1)",
            fix="optimizer.betas=[0.9,0.999]",
        ),
        Row(
            "optimizer.momentum",
            lambda c: not 0 <= c.optimizer.momentum < 1,
            "must lie in [0, 1)",
            fix="optimizer.momentum=0.9",
        ),
    ),
)


def _read_by(key: str, rule: str, why: str, default: str) -> Row[RunConfig]:
    """A key that is set is one that the optimizer reads."""
    path, unset = f"optimizer.{key}", getattr(_DEFAULT, key)

    return Row(
        path,
        lambda c: bool(value_at(c, path) != unset),
        rule,
        f"{why} for {{optimizer.name}}",
        fix=f"{path}={default}",
        when=lambda c: key not in _kind(c).reads,
    )


def _decoupled(own: bool) -> Row[RunConfig]:
    """An optimizer that knows one weight decay is not asked for the other."""
    path, shown = "optimizer.decoupled_weight_decay", str(own).lower()
    return Row(
        path,
        lambda c: c.optimizer.decoupled_weight_decay is (not own),
        f"must be {shown} for {{optimizer.name}}",
        "{optimizer.name} knows no other weight decay",
        fix=f"{path}={shown}",
        when=lambda c: _kind(c).decoupled is own,
    )


_KEYS: tuple[Row[RunConfig], ...] = (
    _read_by("momentum", "belongs to optimizer=sgd, lars or kfac", "It has no meaning", "0"),
    _read_by("betas", "belong to adam and adamw", "They have no meaning", "[0.9,0.999]"),
    _read_by("eps", "belongs to adam and adamw", "It has no meaning", "1e-8"),
    _decoupled(False),
    _decoupled(True),
)


def _unclipped(key: str) -> Row[RunConfig]:
    return Row(
        f"trainer.{key}",
        lambda c: is_given(c, f"trainer.{key}"),
        "must be null with optimizer={optimizer.name}",
        "After freezing replicas exchange momentum, and no rank has the sum of gradients",
        fix=f"trainer.{key}=null",
    )


_ONE_BIT: tuple[Row[RunConfig], ...] = (
    Row(
        "optimizer.freeze_step",
        lambda c: is_given(c, "optimizer.freeze_step"),
        "belongs to optimizer=onebit_adam, zero_one_adam or onebit_lamb",
        "{optimizer.name} exchanges whole gradients at every step",
        fix="optimizer.freeze_step=null",
        when=lambda c: not _compresses(c),
    ),
    *where(
        _compresses,
        Row(
            "optimizer.freeze_step",
            lambda c: not is_given(c, "optimizer.freeze_step"),
            "must be given",
            "The variance stays from this step on",
            fix="optimizer.freeze_step=100",
        ),
        Row(
            "optimizer.freeze_step",
            lambda c: (
                c.optimizer.name == "onebit_lamb"
                and c.optimizer.freeze_step is not None
                and c.optimizer.freeze_step < _LAMB_WARM_UP
            ),
            f"must be at least {_LAMB_WARM_UP} with onebit_lamb",
            f"A tensor's rate after it is a running mean from nothing, over about {_LAMB_WARM_UP} steps",
            fix="optimizer.freeze_step=100",
            when=lambda c: c.optimizer.name == "onebit_lamb",
        ),
        *where(lambda c: c.optimizer.name != "onebit_lamb", at_least("optimizer.freeze_step", 1)),
        _unclipped("grad_clip_norm"),
        _unclipped("grad_clip_value"),
        Row(
            "schedule.post_validation",
            lambda c: c.schedule.post_validation,
            "must be false with optimizer={optimizer.name}",
            "An update that may be taken back would need a copy of what compression left over",
            fix="schedule.post_validation=false",
        ),
    ),
    Row(
        "optimizer.variance_refreshes",
        lambda c: not is_given(c, "optimizer.variance_refreshes"),
        "must be given",
        "After so many refreshes of the variance the interval between them doubles",
        fix="optimizer.variance_refreshes=16",
        when=lambda c: c.optimizer.name == "zero_one_adam",
    ),
    Row(
        "optimizer.variance_refreshes",
        lambda c: is_given(c, "optimizer.variance_refreshes"),
        "belongs to optimizer=zero_one_adam",
        "{optimizer.name} has no steps that refresh the variance between others",
        fix="optimizer.variance_refreshes=null",
        when=lambda c: c.optimizer.name != "zero_one_adam",
    ),
    at_least("optimizer.variance_refreshes", 1),
)


def _of_kfac(key: str) -> Row[RunConfig]:
    return Row(
        f"optimizer.{key}",
        lambda c: is_given(c, f"optimizer.{key}"),
        "belongs to optimizer=kfac",
        "{optimizer.name} keeps no factors",
        fix=f"optimizer.{key}=null",
        when=lambda c: not _is_kfac(c),
    )


def _under_kfac() -> Iterator[Row[RunConfig]]:
    """What K-FAC's factors cannot be taken under."""
    seen = "Its factors are sums over what the layers of one process are given in a forward and a backward"
    needed: tuple[tuple[str, object, str], ...] = (
        ("parallelism.data", 1, "and replicas see other samples"),
        ("zero.stage", None, "and DeepSpeed runs them itself"),
        ("precision.name", "fp32", "in fp32, as are their inverses"),
        ("compile", False, "and compiled layers call no hooks"),
        ("activation_checkpoint.name", "none", "whose inputs would stay"),
        ("offload.activations", "none", "whose inputs would stay on the device"),
        ("schedule.post_validation", False, "which could not be taken back"),
    )
    for path, value, because in needed:
        shown = "null" if value is None else str(value).lower()
        fix = f"{path.removesuffix('.name')}={shown}"
        yield Row(
            path,
            _differs(path, value),
            f"must be {shown} with optimizer={{optimizer.name}}",
            f"{seen}, {because}",
            fix=fix,
        )


def _differs(path: str, value: object) -> Callable[[RunConfig], bool]:
    return lambda config: bool(value_at(config, path) != value)


_KFAC: tuple[Row[RunConfig], ...] = (
    Row(
        "optimizer.damping",
        lambda c: not is_given(c, "optimizer.damping"),
        "must be given",
        "Factors are damped and inverted",
        fix="optimizer.damping=1e-3",
        when=_is_kfac,
    ),
    _of_kfac("damping"),
    _of_kfac("refresh_every"),
    *where(
        _is_kfac,
        positive("optimizer.damping", "1e-3"),
        at_least("optimizer.refresh_every", 1),
        *_under_kfac(),
    ),
)


def _of_custom(key: str) -> Row[RunConfig]:
    return Row(
        f"optimizer.{key}",
        lambda c: bool(getattr(c.optimizer, key)),
        "belongs to optimizer=custom",
        "{optimizer.name} calls no function of yours",
        fix="optimizer=custom",
        when=lambda c: not _is_custom(c),
    )


_CUSTOM: tuple[Row[RunConfig], ...] = (
    _of_custom("target"),
    _of_custom("kwargs"),
    Row(
        "optimizer.target",
        lambda c: not is_given(c, "optimizer.target"),
        "must be given",
        "The option custom calls your own function",
        fix="optimizer.target=package.module:function",
        when=_is_custom,
    ),
    Row(
        "optimizer.weight_decay",
        lambda c: c.optimizer.weight_decay != 0,
        "must be 0 with optimizer=custom",
        "Your function is called with lr and its kwargs alone",
        fix="+optimizer.kwargs.weight_decay=0.1",
        when=_is_custom,
    ),
)

OPTIMIZER_TABLES: tuple[Table[RunConfig], ...] = (
    _NUMBERS,
    Table("Keys of an optimizer", _KEYS, applies=_is_known),
    Table("1-bit optimizers", _ONE_BIT, applies=_is_known),
    Table("K-FAC", _KFAC, applies=_is_known),
    Table("An optimizer of your own", _CUSTOM, applies=_is_known),
)
"""In the order in which they are checked."""
