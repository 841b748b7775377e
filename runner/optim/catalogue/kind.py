"""What an optimizer says of itself. The facts need no torch; a maker imports what it needs when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from runner.config.rules.table import Table
from runner.config.schema import OptimizerConfig, RunConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from runner.engine.works.watch import LayerWatch
    from runner.profiling.fills import FillProfiler

__all__ = ["BETAS", "ERROR_WIDTH", "FP32_WIDTH", "OptimizerKind", "common_settings"]

FP32_WIDTH = 4
"""Bytes of an fp32 value."""

ERROR_WIDTH = 4
"""Bytes of an element of what compression left over: fp32."""

BETAS = ("betas", "eps")
"""The keys that Adam and its kin read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """One optimizer.

    The defaults are those of an optimizer of which nothing is known, so that a user's own need not say more than what
    it is and how it is made. Sizes are in bytes, counts of values are per element of a parameter.

    Args:
        name: what ``optimizer=`` calls it.
        description: what it does, in one line.
        cost: the values that it keeps per parameter, in words.
        remarks: its library, its limits, in words.
        make: the optimizer over one rank's trainable parameters, in one group. It imports what it needs by itself.
        values: states of a parameter's own format that it keeps per element; momentum's is counted where it is on.
            None: they are seen at a step of a small one.
        state_bytes: of one tensor of so many elements, where that is not ``values`` in the parameter's own format.
        constant_bytes: tables that it keeps once.
        temporaries: tensors of the size of the largest parameter that one step makes and drops.
        reads: keys of its section besides ``name``, ``lr`` and ``weight_decay`` that mean something to it.
        decoupled: whether weight decay leaves the moments alone; None: as ``optimizer.decoupled_weight_decay`` says.
        package: what must be installed, by the name it is imported by.
        extra: the extra of this package that installs it.
        operator: the name of DeepSpeed's operator that is compiled when it is first used.
        imports: modules that its maker imports, and that ranks of one machine may share.
        elementwise: an element's update depends on that element's gradients alone, so that flat partitions may cut
            weights anywhere.
        by_weight: its states can be told apart by weight, so that replicas may share them out weight by weight.
        place: where its states and its update may be: on the device alone, in the host's memory alone, or in either.
        compresses: replicas exchange one bit per element of the momentum in place of gradients, at some steps.
        watch: what it does with what it sees of the layers; None: it sees nothing but gradients.
        profiler: measures what that takes of a layer; None: it takes nothing.
        fills: the key of the :class:`~runner.schedule.fills.Filling` that it does where a schedule has that in its
            bubbles; None: none.
        order_rules: what a request with this optimizer must keep besides, once its schedule is known: tables over
            :class:`runner.plan.rules.facts.OrderFacts`.
        brings: options of other groups, by group, that it makes no sense without; used where the group is not named.
        rules: what a request with this optimizer must keep; kinds may share a table.
        classes: qualified names of the optimizer classes that it makes, where their states are known.
        counts_steps: whether a state's ``step`` is a tensor or a number: checkpoints are read into either.
    """

    name: str
    description: str
    make: Callable[[OptimizerConfig, list[Tensor]], Optimizer] = field(repr=False)
    cost: str = ""
    remarks: str = ""
    values: float | None = None
    state_bytes: Callable[[int], int] | None = None
    constant_bytes: int = 0
    temporaries: int = 2
    reads: tuple[str, ...] = ("kwargs", "target")
    decoupled: bool | None = None
    package: str | None = None
    extra: str | None = None
    operator: str | None = None
    imports: tuple[str, ...] = ()
    elementwise: bool = False
    by_weight: bool = False
    place: Literal["device", "host", "either"] = "either"
    compresses: bool = False
    watch: Callable[[Any], LayerWatch] | None = field(default=None, repr=False)
    profiler: Callable[[], FillProfiler] | None = field(default=None, repr=False)
    fills: str | None = None
    order_rules: tuple[Table[Any], ...] = field(default=(), repr=False)
    brings: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[Table[RunConfig], ...] = field(default=(), repr=False)
    classes: tuple[str, ...] = ()
    counts_steps: Literal["tensor", "number"] = "tensor"

    @property
    def is_kin_of_adam(self) -> bool:
        """Whether it takes Adam's settings, so that a recipe's mean the same to it."""
        return set(BETAS) <= set(self.reads)

    def keeps_momentum(self, section: OptimizerConfig) -> bool:
        """Whether the section asks for momentum, and this optimizer has it: one value more."""
        return "momentum" in self.reads and section.momentum > 0


def common_settings(section: OptimizerConfig) -> dict[str, Any]:
    """What Adam and its kin are called with: ``lr``, ``betas``, ``eps`` and ``weight_decay``."""
    betas = (section.betas[0], section.betas[1])
    return {"lr": section.lr, "betas": betas, "eps": section.eps, "weight_decay": section.weight_decay}
