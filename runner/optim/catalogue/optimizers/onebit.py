"""Optimizers whose replicas exchange momentum in bits: 1-bit Adam, with and without refreshes, and 1-bit LAMB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runner.config.rules.table import Row, Table
from runner.config.rules.values import another_schedule, at_least, is_given
from runner.config.schema import OptimizerConfig, RunConfig
from runner.optim.catalogue.kind import BETAS, FP32_WIDTH, OptimizerKind, common_settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["ONEBIT_ADAM", "ONEBIT_LAMB", "ONEBIT_ADAM_REFRESHED"]

_READS = (*BETAS, "freeze_step")
_REMARKS = "compressed steps send a fifteenth of fp16's bytes"
_COUNT = 8  # bytes of an int64
_LAMB_WARM_UP = 10  # steps: 1 / (1 - 0.9), of the running mean in runner/optim/kinds/onebit_lamb.py


def _onebit_adam(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.onebit import OneBitAdam

    return OneBitAdam(parameters, **common_settings(section), freeze_step=_given(section.freeze_step))


def _onebit_adam_refreshed(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.onebit import RefreshedOneBitAdam

    freeze_step, refreshes = _given(section.freeze_step), _given(section.variance_refreshes)
    return RefreshedOneBitAdam(parameters, **common_settings(section), freeze_step=freeze_step, refreshes=refreshes)


def _onebit_lamb(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.onebit_lamb import OneBitLamb

    return OneBitLamb(parameters, **common_settings(section), freeze_step=_given(section.freeze_step))


def _exchange_bytes(replicas: int) -> float:
    """Bytes of an element of a rank's momentum while replicas exchange its signs, by ``SignCompression.mean``.

    The momentum, its mask and all messages are there, and of one replica's chunk four fp32 values or as many bytes of
    indices, and three copies of the signs.
    """
    return 5.5 + 20 / replicas


def _given(value: int | None) -> int:
    assert value is not None  # a rule requires it
    return value


def _two_moments(elements: int) -> int:
    return 2 * FP32_WIDTH * elements


def _three_moments(elements: int) -> int:
    return 3 * FP32_WIDTH * elements


def _unclipped(key: str) -> Row[RunConfig]:
    return Row(
        f"trainer.{key}",
        lambda c: is_given(c, f"trainer.{key}"),
        "must be null with optimizer={optimizer.name}",
        "After freezing replicas exchange momentum, and no rank has the sum of gradients",
        fix=f"trainer.{key}=null",
    )


_RULES: Table[RunConfig] = Table(
    "1-bit optimizers",
    (
        Row(
            "optimizer.freeze_step",
            lambda c: not is_given(c, "optimizer.freeze_step"),
            "must be given",
            "The variance stays from this step on",
            fix="optimizer.freeze_step=100",
        ),
        at_least("optimizer.freeze_step", 1),
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
)

_ORDERS: Table[Any] = Table(
    "Schedules under which momentum cannot be compressed",
    (
        another_schedule(
            "optimizer={config.optimizer.name}",
            "Several ranks of {order.name} hold a stage, and after freezing nobody sums the gradients of its copies",
            lambda order: order.has_copies,
        ),
    ),
    first_of_each_key=True,
)

_OF_LAMB: Table[RunConfig] = Table(
    "1-bit LAMB",
    (
        Row(
            "optimizer.freeze_step",
            lambda c: 1 <= c.optimizer.freeze_step < _LAMB_WARM_UP,  # type: ignore[operator]  # it is given, see below
            f"must be at least {_LAMB_WARM_UP} with onebit_lamb",
            f"A tensor's rate after it is a running mean from nothing, over about {_LAMB_WARM_UP} steps",
            fix="optimizer.freeze_step=100",
            when=lambda c: is_given(c, "optimizer.freeze_step"),
        ),
    ),
)

_OF_REFRESHES: Table[RunConfig] = Table(
    "refreshed 1-bit Adam",
    (
        Row(
            "optimizer.variance_refreshes",
            lambda c: not is_given(c, "optimizer.variance_refreshes"),
            "must be given",
            "After so many refreshes of the variance the interval between them doubles",
            fix="optimizer.variance_refreshes=16",
        ),
        at_least("optimizer.variance_refreshes", 1),
    ),
)

ONEBIT_ADAM = OptimizerKind(
    name="onebit_adam",
    description="Adam whose replicas exchange momentum in bits from `optimizer.freeze_step` on",
    cost="2, and what compression left over",
    remarks=_REMARKS,
    make=_onebit_adam,
    lingering=0,
    at_once=_exchange_bytes,
    values=2.0,
    state_bytes=_two_moments,
    count_bytes=_COUNT,
    reads=_READS,
    examples={"freeze_step": (1, 2)},
    decoupled=True,
    compresses=True,
    order_rules=(_ORDERS,),
    rules=(_RULES,),
    classes=("runner.optim.kinds.onebit.OneBitAdam",),
)

ONEBIT_ADAM_REFRESHED = OptimizerKind(
    name="onebit_adam_refreshed",
    description="Adam whose replicas exchange momentum in bits but for refreshes of the variance, at growing intervals",
    cost="2, and what compression left over",
    remarks=_REMARKS,
    make=_onebit_adam_refreshed,
    lingering=0,
    at_once=_exchange_bytes,
    values=2.0,
    state_bytes=_two_moments,
    count_bytes=_COUNT,
    reads=(*_READS, "variance_refreshes"),
    examples={"freeze_step": (1, 2), "variance_refreshes": (1,)},
    decoupled=True,
    compresses=True,
    order_rules=(_ORDERS,),
    rules=(_RULES, _OF_REFRESHES),
    classes=("runner.optim.kinds.onebit.RefreshedOneBitAdam",),
)

ONEBIT_LAMB = OptimizerKind(
    name="onebit_lamb",
    description="LAMB whose replicas exchange momentum in bits from `optimizer.freeze_step` on",
    cost="3, and what compression left over",
    remarks=_REMARKS,
    make=_onebit_lamb,
    lingering=0,
    at_once=_exchange_bytes,
    decay_temporaries=2,
    values=3.0,
    state_bytes=_three_moments,
    count_bytes=_COUNT,
    reads=_READS,
    examples={"freeze_step": (10,)},
    decoupled=True,
    compresses=True,
    order_rules=(_ORDERS,),
    rules=(_RULES, _OF_LAMB),
    classes=("runner.optim.kinds.onebit_lamb.OneBitLamb",),
)
