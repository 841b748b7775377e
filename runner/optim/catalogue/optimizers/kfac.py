"""K-FAC: gradient descent with gradients that are preconditioned layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from runner.config.rules.table import Row, Table, value_at
from runner.config.rules.values import another_schedule, at_least, is_given, positive
from runner.config.schema import OptimizerConfig, RunConfig
from runner.optim.catalogue.kind import OptimizerKind

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from runner.engine.works.watch import LayerWatch
    from runner.profiling.fills import FillProfiler

__all__ = ["KFAC"]


def _make(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.kfac import KFAC as Preconditioned

    assert section.damping is not None  # a rule requires it
    return Preconditioned(
        parameters,
        lr=section.lr,
        momentum=section.momentum,
        weight_decay=section.weight_decay,
        damping=section.damping,
        **({} if section.refresh_every is None else {"refresh_every": section.refresh_every}),
    )


def _watch(optimizer: Any) -> LayerWatch:
    from runner.engine.actions.curvature import CurvatureWatch

    return CurvatureWatch(optimizer)


def _profiler() -> FillProfiler:
    from runner.profiling.factors import FactorProfiler

    return FactorProfiler()


def _differs(path: str, value: object) -> Callable[[RunConfig], bool]:
    return lambda config: bool(value_at(config, path) != value)


def _needed() -> Iterator[Row[RunConfig]]:
    """Rules against settings under which K-FAC cannot compute its factors."""
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
        rule = f"must be {shown} with optimizer={{optimizer.name}}"
        yield Row(path, _differs(path, value), rule, f"{seen}, {because}", fix=fix)


_RULES: Table[RunConfig] = Table(
    "K-FAC",
    (
        Row(
            "optimizer.damping",
            lambda c: not is_given(c, "optimizer.damping"),
            "must be given",
            "Factors are damped and inverted",
            fix="optimizer.damping=1e-3",
        ),
        positive("optimizer.damping", "1e-3"),
        at_least("optimizer.refresh_every", 1),
        *_needed(),
    ),
)


_against_factors = partial(another_schedule, "optimizer={config.optimizer.name}")

_ORDERS: Table[Any] = Table(
    "Schedules under which K-FAC cannot take its factors",
    (
        _against_factors(
            "Several ranks of {order.name} hold a stage, and each copy sees a part of the micro-batches",
            lambda order: order.has_copies,
        ),
        _against_factors(
            "{order.name} sends what autograd saved to another rank, and the layers' inputs would stay",
            lambda order: order.moves_activations,
        ),
        _against_factors(
            "{order.name} splits the backward, and its factors are taken in a whole one",
            lambda order: order.splits_backward,
        ),
    ),
    first_of_each_key=True,
)

_IN_BUBBLES: Table[Any] = Table(
    "Schedules whose bubbles are filled with K-FAC's work",
    (
        Row(
            "optimizer.refresh_every",
            lambda f: f.config.optimizer.refresh_every is not None,
            "must be null with schedule={order.name}",
            "The inverses are new when the bubbles of {order.name} have had room for them",
            fix="optimizer.refresh_every=null",
            when=lambda f: f.order.filling is not None,
        ),
    ),
)

KFAC = OptimizerKind(
    name="kfac",
    description="gradient descent on gradients of linear layers that K-FAC preconditions",
    cost="two factors and two inverses per linear layer",
    remarks="one replica, fp32",
    make=_make,
    lingering=0,
    values=0.0,
    temporaries=3,
    reads=("momentum", "damping", "refresh_every"),
    examples={"damping": (0.01, 0.1), "refresh_every": (1, 2)},
    decoupled=False,
    watch=_watch,
    profiler=_profiler,
    fills="curvature",
    rules=(_RULES,),
    order_rules=(_ORDERS, _IN_BUBBLES),
    classes=("runner.optim.kinds.kfac.KFAC",),
)
