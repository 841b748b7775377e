"""What is measured on weights: losses, sharpness, and how much gradients of batches differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Noise", "gradient_noise", "gradients_of", "largest_eigenvalue", "mean_loss"]

Loss = Callable[[nn.Module, slice], Tensor]
"""The mean loss of a model over some samples of a data set."""


@torch.no_grad()
def mean_loss(model: nn.Module, loss: Loss, samples: int, at_once: int = 96) -> float:
    """The mean loss over the first ``samples`` samples."""
    total = 0.0
    for begin in range(0, samples, at_once):
        part = slice(begin, min(samples, begin + at_once))
        total += float(loss(model, part)) * (part.stop - part.start)
    return total / samples


def largest_eigenvalue(
    model: nn.Module, loss: Callable[[], Tensor], *, most: int = 30, tolerance: float = 0.01, seed: int = 0
) -> float:
    """The largest eigenvalue of the Hessian of ``loss`` at the model's weights, by power iteration.

    The iteration finds the eigenvalue of largest magnitude. If that is negative, a second one, of the Hessian less this
    eigenvalue times the identity, finds the largest.

    Args:
        model: its trained weights are those of the Hessian.
        loss: the loss of a fixed batch; it can be differentiated twice.
        most: products with the Hessian at most, of each iteration.
        tolerance: the iteration ends if the eigenvalue changes by less than this part.
        seed: of the first direction.
    """
    weights = [each for each in model.parameters() if each.requires_grad]
    first = _iterate(weights, loss, 0.0, most, tolerance, seed)
    return first if first >= 0 else first + _iterate(weights, loss, first, most, tolerance, seed)


def _iterate(
    weights: Sequence[Tensor], loss: Callable[[], Tensor], shift: float, most: int, tolerance: float, seed: int
) -> float:
    """The eigenvalue of largest magnitude of the Hessian less ``shift`` times the identity."""
    gradient = _flat(torch.autograd.grad(loss(), weights, create_graph=True))
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(seed), dtype=gradient.dtype)
    found = 0.0
    for _ in range(most):
        direction = direction / direction.norm()
        product = _flat(torch.autograd.grad(gradient @ direction, weights, retain_graph=True)) - shift * direction
        before, found = found, float(direction @ product)
        if abs(found - before) <= tolerance * abs(found):
            break
        direction = product
    return found


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])


def gradients_of(model: nn.Module, loss: Loss, samples: int, batch: int) -> Tensor:
    """The gradients of consecutive batches, [samples // batch, elements of all weights]."""
    weights = [each for each in model.parameters() if each.requires_grad]
    rows = []
    for begin in range(0, samples - batch + 1, batch):
        rows.append(_flat(torch.autograd.grad(loss(model, slice(begin, begin + batch)), weights)))
    return torch.stack(rows)


@dataclass(frozen=True, slots=True)
class Noise:
    """How much the gradients of batches differ.

    Args:
        batch: samples of a batch.
        batches: how many were compared.
        variance: the sum over all weights of the variance of a batch's gradient.
    """

    batch: int
    batches: int
    variance: float


def gradient_noise(gradients: Tensor, batch: int, multiples: Sequence[int]) -> list[Noise]:
    """The variance of the gradients of batches and of their unions.

    Batches without a common sample are a random partition of the samples. Then the mean of this estimate, over all
    partitions, is the variance of one sample's gradient divided by the samples of a batch, without a correction for the
    size of the data set.

    Args:
        gradients: of batches in random order, [batches, elements].
        batch: samples of each.
        multiples: how many of them are united; at least two unions must be left.
    """
    found = []
    for multiple in multiples:
        count = len(gradients) // multiple
        means = gradients[: count * multiple].view(count, multiple, -1).mean(dim=1)
        found.append(Noise(batch * multiple, count, float(means.var(dim=0).sum())))
    return found
