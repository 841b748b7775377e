"""An optimizer made by a user's own function, about which nothing else is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.rules.table import Row, Table
from runner.config.schema import OptimizerConfig, RunConfig
from runner.errors import Problem, RequestError
from runner.optim.catalogue.kind import OptimizerKind
from runner.targets import call_named, import_target

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["CUSTOM"]


def _make(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from torch.optim import Optimizer

    assert section.target is not None  # a rule requires it
    function = import_target("optimizer.target", section.target)
    made = call_named("optimizer.target", section.target, function, parameters, lr=section.lr, **section.kwargs)
    if not isinstance(made, Optimizer):
        rule, kind = "must return a torch.optim.Optimizer", type(made).__name__
        raise RequestError([Problem("optimizer.target", section.target, rule, f"It returned a {kind}")])
    return made


_RULES: Table[RunConfig] = Table(
    "An optimizer that a function of yours makes",
    (
        Row(
            "optimizer.weight_decay",
            lambda c: c.optimizer.weight_decay != 0,
            "must be 0 with optimizer={optimizer.name}",
            "Your function is called with lr and its kwargs alone",
            fix="+optimizer.kwargs.weight_decay=0.1",
        ),
    ),
)

CUSTOM = OptimizerKind(
    name="custom",
    description="what `optimizer.target`, your own function, returns",
    cost="your function's",
    remarks="whole tensors are assumed, so not with `zero.stage` 1 to 3",
    make=_make,
    values=None,
    takes_complex=True,
    reads=("target", "kwargs"),
    rules=(_RULES,),
)
