"""K-FAC: gradient descent on gradients that are preconditioned, layer by layer, by an estimate of the curvature.

Of an ``nn.Linear`` with inputs a (1 appended where it has a bias) and gradients g of its outputs, one of each per
sample or token, the curvature is taken for the Kronecker product of two factors, A = mean a aᵀ and B = mean g gᵀ. The
update is (B + √λ)⁻¹ G (A + √λ)⁻¹ of the gradient G = [of the weight, of the bias], λ being the damping. Gradients g
are those of the loss's sum over samples, so that the factors do not depend on the batch's size.

The factors are summed in every backward of a step that refreshes, and inverted at its end; the steps between use the
inverses there are.

Source: Martens & Grosse 2015, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", sections 3
and 6.3 (with π = 1); gradients are those of the targets (the empirical Fisher), as in Osawa et al. 2023, "PipeFisher".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

__all__ = ["KFAC", "Factors", "curvature_bytes", "preconditioned_layers"]

_INPUT, _OUTPUT, _AGE = "inverse_input", "inverse_output", "steps_since_refresh"


def preconditioned_layers(module: nn.Module, tied: Collection[Tensor] = ()) -> Iterator[nn.Linear]:
    """The ``nn.Linear`` (no class derived from it) of a module whose trainable weight is theirs alone.

    Args:
        module: any.
        tied: weights that other modules hold besides.
    """
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    shared = {id(parameter) for parameter in tied} | {key for key, count in uses.items() if count > 1}
    for each in module.modules():
        if type(each) is nn.Linear and each.weight.requires_grad and shared.isdisjoint(map(id, each.parameters())):
            yield each


def curvature_bytes(layer: nn.Linear) -> int:
    """Of both factors of a layer and of their inverses, each in the weight's format."""
    inputs, outputs = layer.in_features + _has_bias(layer), layer.out_features
    return 2 * (inputs**2 + outputs**2) * layer.weight.element_size()


class KFAC(SGD):
    """See the module's text. Parameters of layers that are not watched are updated by their gradients as they are.

    Args:
        parameters: fp32.
        lr, momentum, weight_decay: gradient descent's, applied to the preconditioned gradient.
        damping: λ, added in half to each factor: √λ on its diagonal.
        refresh_every: updates for which the inverses are used.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        damping: float,
        refresh_every: int,
    ) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self._damping = damping
        self._refresh_every = refresh_every
        self._factors: list[Factors] = []
        self._recording = False

    def watch(self, layers: Iterable[nn.Linear]) -> None:
        """Precondition these layers' gradients, from what their forwards and backwards see from now on."""
        for layer in layers:
            factors = self.track(layer.weight, layer.bias if _has_bias(layer) else None)
            layer.register_forward_hook(partial(self._record, factors), with_kwargs=True)

    def track(self, weight: Tensor, bias: Tensor | None) -> Factors:
        """Precondition the gradients of one layer's weight [out, in] and bias [out]; its sums, which others fill."""
        self._factors.append(Factors(weight, bias))
        return self._factors[-1]

    @property
    def factors(self) -> list[Tensor]:
        """The sums of all layers: what is held besides the states."""
        return [total for each in self._factors for total in (each.inputs, each.outputs)]

    @property
    def refresh_every(self) -> int:
        """Updates for which the inverses are used."""
        return self._refresh_every

    def begin(self) -> None:
        """A step's first forward comes: forget what was summed for a step that did not end."""
        self._recording = True
        for factors in self._factors:
            factors.clear()

    @torch.no_grad()
    def refresh(self, *, due_only: bool = False) -> None:
        """Take new inverses of the sums there are, which become damped means in place.

        Args:
            due_only: where the inverses are old enough, and there is a sum.
        """
        for factors in self._factors:
            if due_only and not (factors.rows and self._is_due(factors)):
                continue
            state = self.state[factors.weight]
            state[_INPUT], state[_OUTPUT] = (
                _inverse(total.div_(max(1, factors.rows)), self._damping) for total in (factors.inputs, factors.outputs)
            )
            state[_AGE] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update from ``grad``, the mean's gradients; those of watched layers are preconditioned in place."""
        self._recording = False
        self.refresh(due_only=True)
        for factors in self._factors:
            state = self._state_of(factors)
            if state:
                state[_AGE] += 1
                _precondition(factors, state[_INPUT], state[_OUTPUT])
        result: float | None = super().step(closure)
        return result

    def _state_of(self, factors: Factors) -> dict[str, Any] | None:
        """A layer's, once it has inverses."""
        state: dict[str, Any] = self.state.get(factors.weight, {})
        return state if _AGE in state else None

    def _is_due(self, factors: Factors) -> bool:
        state = self._state_of(factors)
        return state is None or int(state[_AGE]) >= self._refresh_every

    def _record(
        self, factors: Factors, layer: nn.Linear, given: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
    ) -> None:
        """The input waits for the output's gradient; autograd keeps it as long, for the weight's."""
        if self._recording and output.requires_grad and self._is_due(factors):
            value = given[0] if given else named["input"]
            output.register_hook(partial(factors.add, value.detach()))  # type: ignore[no-untyped-call]


class Factors:
    """Sums of a aᵀ and g gᵀ of one layer, and of how many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        outputs, inputs = weight.shape
        self.inputs, self.outputs = (weight.new_zeros(size, size) for size in (inputs + (bias is not None), outputs))
        self.rows = 0

    def clear(self) -> None:
        self.inputs.zero_()
        self.outputs.zero_()
        self.rows = 0

    @torch.no_grad()
    def add(self, given: Tensor, gradient: Tensor) -> None:
        """Of one micro-batch: inputs [..., in] and the gradients [..., out] of what was made of them."""
        inputs, gradients = (value.reshape(-1, value.shape[-1]) for value in (given, gradient))
        width = inputs.shape[1]
        self.inputs[:width, :width].addmm_(inputs.T, inputs)
        if self.bias is not None:  # as if each input ended with 1
            total = inputs.sum(dim=0)
            self.inputs[width, :width] += total
            self.inputs[:width, width] += total
            self.inputs[width, width] += len(inputs)
        self.outputs.addmm_(gradients.T, gradients)
        self.rows += len(inputs)


def _has_bias(layer: nn.Linear) -> bool:
    bias: Tensor | None = layer.bias
    return bias is not None and bias.requires_grad


def _inverse(factor: Tensor, damping: float) -> Tensor:
    """Of a factor, which is damped in place."""
    factor.diagonal().add_(damping**0.5)
    return torch.cholesky_inverse(torch.linalg.cholesky(factor))


def _precondition(factors: Factors, inverse_input: Tensor, inverse_output: Tensor) -> None:
    """Replace the gradients of a layer's weight and bias."""
    weight, bias = factors.weight.grad, factors.bias.grad if factors.bias is not None else None
    if weight is None:
        return
    if bias is None:
        weight.copy_(inverse_output @ weight @ inverse_input)
        return
    gradient = inverse_output @ torch.cat([weight, bias.unsqueeze(1)], dim=1) @ inverse_input
    weight.copy_(gradient[:, :-1])
    bias.copy_(gradient[:, -1])
