"""K-FAC: gradient descent with gradients that are preconditioned, layer by layer, by an estimate of the curvature.

An ``nn.Linear`` has inputs a (with 1 appended if it has a bias) and gradients g of its outputs, one of each per sample
or token. Its curvature is approximated by the Kronecker product of two factors, A = mean a aᵀ and B = mean g gᵀ. The
update is (B + √λ)⁻¹ G (A + √λ)⁻¹, where G = [gradient of the weight, gradient of the bias] and λ is the damping. The
gradients g are those of the loss's sum over samples, so that the factors do not depend on the batch size.

The factors are summed in every backward of a step that refreshes them, and inverted at its end; the steps between use
the last inverses. Alternatively, a schedule says when each factor is summed and inverted
(:meth:`KFAC.follow_schedule`), and every step uses the newest inverses.

Source: Martens & Grosse 2015, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", sections 3
and 6.3 (with π = 1); gradients are those of the targets (the empirical Fisher), as in Osawa et al. 2023, "PipeFisher".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

__all__ = [
    "KFAC",
    "Factor",
    "Factors",
    "curvature_bytes",
    "factor_sizes",
    "preconditioned_layers",
    "trained_bias",
]

_INPUT, _OUTPUT, _AGE = "inverse_input", "inverse_output", "steps_since_refresh"
_SUM, _ROWS = "curvature_{}", "curvature_rows_{}"


def preconditioned_layers(module: nn.Module, tied: Collection[Tensor] = ()) -> Iterator[nn.Linear]:
    """The ``nn.Linear`` modules (not of derived classes) whose trainable weight no other module uses.

    Args:
        module: any module.
        tied: weights that modules elsewhere hold too.
    """
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    shared = {id(parameter) for parameter in tied} | {key for key, count in uses.items() if count > 1}
    for each in module.modules():
        if type(each) is nn.Linear and each.weight.requires_grad and shared.isdisjoint(map(id, each.parameters())):
            yield each


def trained_bias(layer: nn.Linear) -> Tensor | None:
    """The bias of a layer, or None if it is not trained."""
    bias: Tensor | None = layer.bias
    return bias if bias is not None and bias.requires_grad else None


def factor_sizes(layer: nn.Linear) -> tuple[int, int]:
    """Number of rows of the factor of a layer's inputs, including the 1 for its bias, and of that of its outputs."""
    return layer.in_features + (trained_bias(layer) is not None), layer.out_features


def curvature_bytes(layer: nn.Linear) -> int:
    """Bytes of both factors of a layer and of their inverses, each in the weight's format."""
    inputs, outputs = factor_sizes(layer)
    return 2 * (inputs**2 + outputs**2) * layer.weight.element_size()


class KFAC(SGD):
    """The optimizer of this module. Parameters of layers that are not watched are updated with their plain gradients.

    Args:
        parameters: weights in fp32.
        lr, momentum, weight_decay: the same as for gradient descent, applied to the preconditioned gradient.
        damping: λ; each factor gets √λ added to its diagonal.
        refresh_every: number of updates for which the inverses are used.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        damping: float,
        refresh_every: int = 10,
    ) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self._damping = damping
        self._refresh_every: int | None = refresh_every
        self._factors: list[Factors] = []
        self._recording = False

    def watch(self, layers: Iterable[nn.Linear]) -> None:
        """Precondition these layers' gradients, with factors from their forwards and backwards from now on."""
        for layer in layers:
            factors = self.track(layer.weight, trained_bias(layer))
            layer.register_forward_hook(partial(self._record, factors), with_kwargs=True)

    def track(self, weight: Tensor, bias: Tensor | None) -> Factors:
        """Precondition gradients of a layer's weight [out, in] and bias [out]; the caller fills the returned sums."""
        self._factors.append(Factors(weight, bias))
        return self._factors[-1]

    def follow_schedule(self) -> None:
        """Compute inverses only when :meth:`invert` is called."""
        self._refresh_every = None

    @property
    def tracked(self) -> Sequence[Factors]:
        """The factors of the layers that it preconditions."""
        return self._factors

    @property
    def factors(self) -> list[Tensor]:
        """The sums of all layers, which are held in addition to the states."""
        return [factor.total for each in self._factors for factor in each]

    @property
    def refresh_every(self) -> int | None:
        """Number of updates for which the inverses are used; None if a schedule decides."""
        return self._refresh_every

    def begin(self) -> None:
        """Start a step, before its first forward; sums of a step that did not end are dropped."""
        self._recording = True
        for factors in self._factors:
            factors.clear()

    def refresh(self, *, due_only: bool = False) -> None:
        """Compute new inverses from the present sums, and reset the sums.

        Args:
            due_only: do so only for layers whose inverses are old enough and that have a sum.
        """
        for factors in self._factors:
            if due_only and not (factors.inputs.rows and self._is_due(factors)):
                continue
            self.invert(factors.inputs)
            self.invert(factors.outputs)
            self.state[factors.weight][_AGE] = torch.zeros(())

    @torch.no_grad()
    def invert(self, factor: Factor) -> None:
        """Compute a new inverse of one factor and reset its sum.

        If the sum is not finite, from a step that was skipped for this reason, the old inverse is kept.
        """
        if factor.rows and bool(factor.total.isfinite().all()):
            self.state[factor.weight][factor.inverse_name] = factor.inverse(self._damping)
        factor.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update from ``grad``, the gradients of the mean loss; those of watched layers are preconditioned in place.

        The gradients of a layer are not preconditioned until both of its inverses exist.
        """
        self._recording = False
        if self._refresh_every is not None:
            self.refresh(due_only=True)
        for factors in self._factors:
            state = self.state.get(factors.weight, {})
            if _AGE in state:
                state[_AGE] += 1
            if _INPUT in state and _OUTPUT in state:
                _precondition(factors, state[_INPUT], state[_OUTPUT])
        result: float | None = super().step(closure)
        return result

    def keep_sums(self) -> None:
        """Put the sums that wait to be inverted into the states, so that they are saved with them."""
        for factor in chain.from_iterable(self._factors):
            state = self.state[factor.weight]
            entries = {_SUM: factor.total, _ROWS: torch.tensor(float(factor.rows))} if factor.rows else {}
            for name in (_SUM, _ROWS):
                state.pop(name.format(factor.name), None)
            state.update({name.format(factor.name): value for name, value in entries.items()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states, and the sums of the layers that are tracked by now."""
        super().load_state_dict(state_dict)
        for factor in chain.from_iterable(self._factors):
            state = self.state.get(factor.weight, {})
            total, rows = (state.pop(name.format(factor.name), None) for name in (_SUM, _ROWS))
            if rows is not None:
                factor.total.copy_(total)
                factor.rows = int(rows)

    def _is_due(self, factors: Factors) -> bool:
        state = self.state.get(factors.weight, {})
        return _AGE not in state or int(state[_AGE]) >= (self._refresh_every or 0)

    def _record(
        self, factors: Factors, layer: nn.Linear, given: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
    ) -> None:
        """Keep the input until the output's gradient comes; autograd keeps it as long for the weight's gradient."""
        if self._recording and output.requires_grad and self._is_due(factors):
            held = [(given[0] if given else named["input"]).detach()]  # the hook lives as long as the graph does
            output.register_hook(lambda gradient: factors.add(held.pop(), gradient))  # type: ignore[no-untyped-call]


class Factor:
    """The sum of v vᵀ of one layer and the number of vectors v, which are its inputs or gradients of its outputs.

    Args:
        weight: the layer's weight.
        name: ``input`` or ``output``.
        size: length of a given v.
        with_ones: whether to append a 1 to each v.
    """

    def __init__(self, weight: Tensor, name: str, size: int, *, with_ones: bool) -> None:
        self.weight, self.name = weight, name
        self.total = weight.new_zeros(size + with_ones, size + with_ones)
        self.rows = 0
        self._with_ones = with_ones

    @property
    def inverse_name(self) -> str:
        """The name of the inverse among the weight's states."""
        return _INPUT if self.name == "input" else _OUTPUT

    def clear(self) -> None:
        self.total.zero_()
        self.rows = 0

    @torch.no_grad()
    def add(self, values: Tensor) -> None:
        """Add the vectors of one micro-batch [..., size]."""
        values = values.reshape(-1, values.shape[-1])
        width = values.shape[1]
        self.total[:width, :width].addmm_(values.T, values)
        if self._with_ones:
            total = values.sum(dim=0)
            self.total[width, :width] += total
            self.total[:width, width] += total
            self.total[width, width] += len(values)
        self.rows += len(values)

    def inverse(self, damping: float) -> Tensor:
        """The inverse of the damped mean, which overwrites the sum.

        LAPACK's is stored by columns. A product with it would be rounded in another way than with one from a
        checkpoint, which is stored by rows.
        """
        self.total.div_(self.rows).diagonal().add_(damping**0.5)
        return torch.cholesky_inverse(torch.linalg.cholesky(self.total)).contiguous()


class Factors:
    """Both factors of a layer: of its inputs, with 1 appended if it has a bias, and of its outputs' gradients."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        outputs, inputs = weight.shape
        self.inputs = Factor(weight, "input", inputs, with_ones=bias is not None)
        self.outputs = Factor(weight, "output", outputs, with_ones=False)

    def __iter__(self) -> Iterator[Factor]:
        yield from (self.inputs, self.outputs)

    def clear(self) -> None:
        self.inputs.clear()
        self.outputs.clear()

    def add(self, given: Tensor, gradient: Tensor) -> None:
        """Add one micro-batch: inputs [..., in] and the gradients [..., out] of the layer's outputs."""
        self.inputs.add(given)
        self.outputs.add(gradient)


def _precondition(factors: Factors, inverse_input: Tensor, inverse_output: Tensor) -> None:
    """Precondition the gradients of a layer's weight and bias in place."""
    weight, bias = factors.weight.grad, factors.bias.grad if factors.bias is not None else None
    if weight is None:
        return
    if bias is None:
        weight.copy_(inverse_output @ weight @ inverse_input)
        return
    gradient = inverse_output @ torch.cat([weight, bias.unsqueeze(1)], dim=1) @ inverse_input
    weight.copy_(gradient[:, :-1])
    bias.copy_(gradient[:, -1])
