"""Defines how an optimizer describes itself. This needs no torch; ``make`` imports what it needs when called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from runner.config.rules.table import Table
from runner.config.schema import OptimizerConfig, RunConfig
from runner.optim.catalogue.motion import Motion

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from runner.engine.works.watch import LayerWatch
    from runner.profiling.fills import FillProfiler

__all__ = ["BETAS", "ERROR_WIDTH", "FP32_WIDTH", "OptimizerKind", "common_settings"]

FP32_WIDTH = 4
"""Bytes of an fp32 value."""

ERROR_WIDTH = 4
"""Bytes of an element of a compression error: fp32."""

BETAS = ("betas", "eps")
"""The keys that Adam and related optimizers read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """The description of one optimizer.

    The defaults are those of an optimizer about which nothing is known, so that a user's own needs only a name, a
    description and ``make``. Sizes are in bytes, counts of values are per element of a parameter.

    Args:
        name: what ``optimizer=`` calls it.
        description: what it does, in one line.
        cost: the values that it keeps per parameter, in words.
        remarks: its library and its limits, in words.
        make: makes the optimizer over one rank's trainable parameters, in one group; it imports what it needs itself.
        values: number of states per element, in the parameter's own format; momentum is counted in addition if it is
            on. None: the states are observed in a step on a small tensor.
        values_by_axes: number of states per element of a parameter with so many axes, if these make a difference.
        state_bytes: bytes of the states of a tensor with the given number of elements, if they are not ``values`` in
            the parameter's own format.
        constant_bytes: size of tables that it keeps once, if it updates a tensor of at least ``table_elements``.
        temporaries: tensors of the size of a parameter that its update makes and drops.
        lingering: how many of them are dropped only when the next parameter's are made, as torch's loops do it.
        at_once: bytes of an element that an update makes and drops of all weights of a rank together, by the number of
            replicas; None: it makes nothing for several weights.
        decay_temporaries: more temporaries where weight decay is added to the gradient.
        half_temporaries: more temporaries, of 16 bits an element, whatever the parameter has.
        reads: keys of its section besides ``name``, ``lr`` and ``weight_decay`` that mean something to it.
        examples: some legal values of these keys, of those that few optimizers read; tests draw from them.
        decoupled: whether weight decay does not change the moments; None: as ``optimizer.decoupled_weight_decay`` says.
        package: the package that must be installed, by the name for its import.
        operator: the name of the DeepSpeed operator that it uses, which is compiled before its first use.
        imports: modules that ``make`` imports, and that ranks of one machine may share.
        norms_from: the least number of dimensions of the weights of which it takes two norms in a step, of whole
            tensors, also where ranks have parts of them; None: it takes none.
        whole_matrices: whether its temporaries of 16 bits are of whole matrices, for which ranks that have parts of one
            put them together, once in a step.
        elementwise: whether the update of an element depends only on that element's gradients, so that flat
            partitions may cut weights anywhere.
        by_weight: whether its states belong to single weights, so that replicas may shard them weight by weight.
        takes_complex: whether it updates weights of complex numbers as torch's optimizers do.
        place: where its states and its update may be: only on the device, only in the host's memory, or in either.
        compresses: whether replicas, at some steps, exchange one bit per element of the momentum instead of gradients.
        motion: how it moves weights, for predictions of them; None: its states do not say.
        watch: what it does with what it sees of the layers; None: it uses only gradients.
        profiler: measures the cost of this for a layer; None: there is no cost.
        fills: the key of the :class:`~runner.schedule.fills.Filling` that it does if a schedule has that work in its
            bubbles; None: it does none.
        order_rules: further rules of a request with this optimizer, which need its schedule: tables over
            :class:`runner.plan.rules.facts.OrderFacts`.
        brings: options of other groups, by group, that it needs to be useful; used if the request does not name the
            group.
        rules: the rules of a request with this optimizer; kinds may share a table.
        classes: qualified names of the optimizer classes that it makes, if their states are known.
        counts_steps: whether a state's ``step`` is a tensor or a number: checkpoints are read into either form.
        count_bytes: bytes of that tensor, if an operator makes it for each weight: then it is counted in a run.
    """

    name: str
    description: str
    make: Callable[[OptimizerConfig, list[Tensor]], Optimizer] = field(repr=False)
    cost: str = ""
    remarks: str = ""
    values: float | None = None
    values_by_axes: Callable[[int], float] | None = None
    state_bytes: Callable[[int], int] | None = None
    constant_bytes: int = 0
    table_elements: int = 0
    temporaries: int = 2
    lingering: int = 1
    at_once: Callable[[int], float] | None = None
    decay_temporaries: int = 0
    half_temporaries: int = 0
    reads: tuple[str, ...] = ("kwargs", "target")
    examples: Mapping[str, Sequence[object]] = field(default_factory=dict)
    decoupled: bool | None = None
    package: str | None = None
    operator: str | None = None
    imports: tuple[str, ...] = ()
    norms_from: int | None = None
    whole_matrices: bool = False
    elementwise: bool = False
    by_weight: bool = False
    takes_complex: bool = False
    place: Literal["device", "host", "either"] = "either"
    compresses: bool = False
    motion: Motion | None = None
    watch: Callable[[Any], LayerWatch] | None = field(default=None, repr=False)
    profiler: Callable[[], FillProfiler] | None = field(default=None, repr=False)
    fills: str | None = None
    order_rules: tuple[Table[Any], ...] = field(default=(), repr=False)
    brings: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[Table[RunConfig], ...] = field(default=(), repr=False)
    classes: tuple[str, ...] = ()
    counts_steps: Literal["tensor", "number"] = "tensor"
    count_bytes: int = 0

    @property
    def is_kin_of_adam(self) -> bool:
        """Whether it takes Adam's settings, so that the settings of a recipe mean the same to it."""
        return set(BETAS) <= set(self.reads)

    def keeps_momentum(self, section: OptimizerConfig) -> bool:
        """Whether it keeps momentum, one more value: the section asks for it and this optimizer has it."""
        return "momentum" in self.reads and section.momentum > 0

    def temporaries_of(self, section: OptimizerConfig, width: int = FP32_WIDTH) -> int:
        """The temporaries of an update as the section asks for it.

        Args:
            section: the request's.
            width: bytes of an element of what is updated.
        """
        coupled = section.weight_decay > 0 and not section.decoupled_weight_decay
        return self.temporaries + (self.decay_temporaries if coupled else 0) + self.halves(width)

    def halves(self, width: int) -> int:
        """The temporaries of 16 bits in units of ``width`` bytes an element."""
        return -(-2 * self.half_temporaries // width)


def common_settings(section: OptimizerConfig) -> dict[str, Any]:
    """The arguments of Adam and related optimizers: ``lr``, ``betas``, ``eps`` and ``weight_decay``."""
    betas = (section.betas[0], section.betas[1])
    return {"lr": section.lr, "betas": betas, "eps": section.eps, "weight_decay": section.weight_decay}
