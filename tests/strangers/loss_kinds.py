"""Losses as strangers write them, a small model and data for them. Plain PyTorch, nothing of the runner.

``RIGHT`` are means over samples, or pairs, for any data; ``WRONG`` are neither; ``NEVER`` break the contract in every
layout. The others depend on the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

CLASSES, WEIGHTS = 7, torch.tensor([0.2, 1.0, 3.0, 0.5, 1.5, 0.1, 2.0])


def build(width: int = 8) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(CLASSES, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip


def data(samples: int = 40, length: int = 6, ignoring: str = "uneven", seed: int = 1) -> TensorDataset:
    """Ids and their classes; -100 does not count: in no target, as often in each sample, or each sample else."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, CLASSES, (samples, length), generator=generator)
    y = torch.randint(0, CLASSES, (samples, length), generator=generator)
    if ignoring == "even":
        y[:, 0] = -100
    for number in range(samples):
        if ignoring == "uneven" or (ignoring == "late" and number >= samples // 2):
            y[number, : int(torch.randint(0, length, (), generator=generator))] = -100
    return TensorDataset(x, y)


def _rows(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output.flatten(0, 1), target.flatten()


def token_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(*_rows(output, target))


def smoothed_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(*_rows(output, target), label_smoothing=0.2)


def token_pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(*_rows(output, target), reduction="sum"), (target != -100).sum()


def class_weighted(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(*_rows(output, target), weight=WEIGHTS)


def class_weighted_pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    rows, wanted = _rows(output, target)
    return F.cross_entropy(rows, wanted, weight=WEIGHTS, reduction="sum"), WEIGHTS[wanted[wanted != -100]].sum()


def over_samples(output: Tensor, target: Tensor) -> Tensor:
    """The mean of the samples' own means, however many tokens each of them has."""
    each = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (each.sum(1) / (target != -100).sum(1).clamp(min=1)).mean()


def squares(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, F.one_hot(target.clamp(min=0), CLASSES).float())


def penalised(output: Tensor, target: Tensor) -> Tensor:
    """Squares with the slope of an energy, by a tensor that it makes to differentiate by."""
    place = output.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad((place**3).sum(), place, create_graph=True)
    return squares(output, target) + (slope * output).mean()


def focal(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output.transpose(1, 2), target.clamp(min=0), reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def cancelling(output: Tensor, target: Tensor) -> Tensor:
    """A difference of two means, as of a critic."""
    return output[..., 0].mean() - output[..., 1].mean()


def batch_mean(output: Tensor, target: Tensor) -> Tensor:
    wanted = F.one_hot(target.clamp(min=0), CLASSES).float().mean(1)
    return F.kl_div(output.mean(1).log_softmax(-1), wanted, reduction="batchmean")


def rounded(output: Tensor, target: Tensor) -> Tensor:
    """In 16 bits, as a loss under autocast."""
    return F.mse_loss(output.bfloat16(), F.one_hot(target.clamp(min=0), CLASSES).bfloat16())


def rounded_once(output: Tensor, target: Tensor) -> Tensor:
    return rounded(output, target).float()


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(*_rows(output, target), reduction="sum")


def by_a_constant(output: Tensor, target: Tensor) -> Tensor:
    return summed(output, target) / 48.0


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Each sample against all others of its batch."""
    one, other = F.normalize(output[:, 0], dim=-1), F.normalize(output[:, 1:].mean(1), dim=-1)
    return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


def spread(output: Tensor, target: Tensor, share: float = 0.1) -> Tensor:
    """A term of the batch's own statistics."""
    return over_samples(output, target) + share * output.mean(1).var(0, unbiased=False).sum()


def overlap(output: Tensor, target: Tensor) -> Tensor:
    """Soft Dice over the whole batch."""
    found, wanted = output.softmax(-1), F.one_hot(target.clamp(min=0), CLASSES).float()
    return 1 - 2 * (found * wanted).sum() / (found.sum() + (wanted * found.detach()).sum())


def root(output: Tensor, target: Tensor) -> Tensor:
    return squares(output, target).sqrt()


def by_hardness(output: Tensor, target: Tensor) -> Tensor:
    """The mean of the hardest half of the batch's tokens."""
    each = F.cross_entropy(*_rows(output, target.clamp(min=0)), reduction="none")
    return each.topk(len(each) // 2).values.mean()


def two_terms(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return over_samples(output, target), 0.1 * output.pow(2).mean()


def with_accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return over_samples(output, target), (output.argmax(-1) == target).sum() + 1


def with_name(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"loss": over_samples(output, target)}


def of_each(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(*_rows(output, target), reduction="none")


def of_negative_weight(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return over_samples(output, target), -len(output)


class Tempered(nn.Module):
    """Learns its temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return over_samples(output * self.scale, target)


class Running(nn.Module):
    """Divides by a running mean of its own values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(1.0))
        self.mean: Tensor

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = over_samples(output, target)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean


tempered, running = Tempered(), Running()
_bound = Tempered()
_calls = itertools.count(1)
_scales = nn.Parameter(torch.ones(CLASSES))


def by_a_weight_outside(output: Tensor, target: Tensor) -> Tensor:
    return over_samples(output * _scales, target)


def annealed(output: Tensor, target: Tensor) -> Tensor:
    """Smaller with each call."""
    return over_samples(output, target) / next(_calls)


_drawing = torch.Generator().manual_seed(5)


def by_its_own_generator(output: Tensor, target: Tensor) -> Tensor:
    return over_samples(output + 0.1 * torch.randn(output.shape, generator=_drawing), target)


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return over_samples(output + 0.1 * torch.randn_like(output), target)


def noisy_sum(output: Tensor, target: Tensor) -> Tensor:
    return summed(output + 0.1 * torch.randn_like(output), target)


little_spread, frozen = partial(spread, share=1e-3), Tempered().requires_grad_(False)
bound_weight = partial(_bound)

RIGHT: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        token_pair,
        class_weighted_pair,
        over_samples,
        squares,
        focal,
        cancelling,
        batch_mean,
        rounded,
        rounded_once,
    )
} | {"frozen": frozen}
BY_DATA = {each.__name__: each for each in (token_mean, smoothed_mean, class_weighted)}
WRONG: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (summed, by_a_constant, contrastive, spread, overlap, root, by_hardness)
} | {"little_spread": little_spread}
NEVER: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        two_terms, with_accuracy, with_name, of_each, of_negative_weight, by_a_weight_outside, annealed,
        by_its_own_generator,
    )
} | {"tempered": tempered, "running": running, "bound_weight": bound_weight}  # fmt: skip


def by_length(output: Tensor, target: Tensor) -> Tensor:
    """Its value is the same everywhere: only its gradient tells that tokens are not counted alike."""
    each = (output - output.detach()).sum(-1).flatten()
    return (each * (target.flatten() != -100)).sum() / (target != -100).sum()


def not_finite(output: Tensor, target: Tensor) -> Tensor:
    return over_samples(output, target) * torch.inf


def as_it_is(output: Tensor, target: Tensor) -> Tensor:
    return output


def both(**kwargs: Any) -> TensorDataset:
    """Samples whose input has the targets, too."""
    x, y = data(**kwargs).tensors
    return TensorDataset(torch.stack([x, y], 1), y)


class _Losing(nn.Module):
    """Takes ids and targets, and returns its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.loss = build(), globals()[kind]

    def forward(self, given: Tensor) -> Any:
        return self.loss(self.net(given[:, 0]), given[:, 1])


def losing(kind: str) -> nn.Module:
    return _Losing(kind)


def stepping(kind: str) -> Any:
    """A LightningModule with dropout and a batch norm, which are no fault of its loss."""
    from lightning.pytorch import LightningModule

    class Stepping(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.drop, self.norm = build(), nn.Dropout(0.2), nn.BatchNorm1d(6)
            self.own_loss = Tempered() if kind == "tempered" else globals()[kind]

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
            x, y = batch
            made = self.own_loss(self.norm(self.drop(self.net(x))), y)
            return {"loss": made[0] / made[1], "weight": made[1]} if isinstance(made, tuple) else made

    return Stepping()
