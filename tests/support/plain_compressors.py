"""Compressors of gradients in plain PyTorch, a few lines each: what R replicas' sums must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Plain = Callable[[Sequence[Tensor], dict[str, Any]], tuple[Tensor, list[Tensor]]]
"""From one tensor of each replica, and what is kept of it, to the sum and what each replica has sent of it."""


def halves(dtype: torch.dtype) -> Plain:
    def plain(tensors: Sequence[Tensor], kept: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        sent = [tensor.to(dtype) for tensor in tensors]
        total = sent[0].clone()
        for each in sent[1:]:
            total += each
        return total.float(), [each.float() for each in sent]

    return plain


def largest(density: float) -> Plain:
    def plain(tensors: Sequence[Tensor], kept: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        sent = []
        for tensor in tensors:
            flat = tensor.flatten()
            order = flat.abs().argsort(descending=True)[: -int(-density * flat.numel() // 1)]
            sent.append(torch.zeros_like(flat).index_copy(0, order, flat[order]).view_as(tensor))
        return torch.stack(sent).sum(dim=0), sent

    return plain


def signs(*, vote: bool) -> Plain:
    def plain(tensors: Sequence[Tensor], kept: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        means = [tensor.abs().mean() for tensor in tensors]
        ones = [torch.where(tensor >= 0, 1.0, -1.0) for tensor in tensors]
        sent = [mean * one for mean, one in zip(means, ones, strict=True)]
        voted = torch.stack(ones).sum(dim=0).sign() * torch.stack(means).sum()
        return voted if vote else torch.stack(sent).sum(dim=0), sent

    return plain


def power(rank: int) -> Plain:
    """From the sum of the replicas' matrices, as the power iteration is linear; ``kept`` has the first right factor."""

    def plain(tensors: Sequence[Tensor], kept: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        if tensors[0].dim() < 2 or rank * sum(tensors[0].shape) >= tensors[0].numel():
            return torch.stack(list(tensors)).sum(dim=0), list(tensors)
        whole = torch.stack(list(tensors)).sum(dim=0)
        basis = torch.linalg.qr(whole @ kept["right"]).Q
        kept["right"] = whole.T @ basis
        return basis @ kept["right"].T, [basis @ (basis.T @ tensor) for tensor in tensors]

    return plain


def alternating(rank: int) -> Plain:
    """Least squares for the left factor at even steps, for the right one at odd steps; ``kept`` has the first right."""

    def plain(tensors: Sequence[Tensor], kept: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        if tensors[0].dim() < 2 or rank >= min(tensors[0].shape):
            return torch.stack(list(tensors)).sum(dim=0), list(tensors)
        step = kept["steps"] = kept.get("steps", -1) + 1
        turned, fixed = [t.T if step % 2 == 0 else t for t in tensors], kept["right" if step % 2 == 0 else "left"]
        fits = [torch.linalg.lstsq(fixed.double(), t.double()).solution.T.float() for t in turned]
        kept["left" if step % 2 == 0 else "right"] = torch.stack(fits).sum(dim=0)
        sent = [fit @ fixed.T if step % 2 == 0 else fixed @ fit.T for fit in fits]
        return torch.stack(sent).sum(dim=0), sent

    return plain


def drawn(density: float, sizes: Sequence[int], seed_of: Callable[[int], int]) -> Plain:
    """The same places on all replicas, drawn tensor after tensor by one generator; ``kept`` says which tensor it is."""

    def plain(tensors: Sequence[Tensor], kept: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        step = kept["steps"] = kept.get("steps", -1) + 1
        generator = torch.Generator().manual_seed(seed_of(step))
        places = [torch.randperm(size, generator=generator) for size in sizes[: kept["at"] + 1]][-1]
        mask = torch.zeros(sizes[kept["at"]])
        mask[places[: -int(-density * len(places) // 1)]] = 1.0
        sent = [tensor * mask.view_as(tensor) for tensor in tensors]
        return torch.stack(sent).sum(dim=0), sent

    return plain


def train(
    model: torch.nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    plain: Plain,
    *,
    replicas: int,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    feedback: bool,
    kept: dict[int, dict[str, Any]],
    microbatches: int = 1,
) -> dict[str, Tensor]:
    """Train on means over samples; each replica takes its contiguous part of a batch; ``loss`` is a sum."""
    parameters, made = list(model.parameters()), optimizer(list(model.parameters()))
    left = [[torch.zeros_like(p) for p in parameters] for _ in range(replicas)]
    for inputs, targets in batches:
        values = []
        for own, x, y in zip(left, inputs.tensor_split(replicas), targets.tensor_split(replicas), strict=True):
            gradients = [torch.zeros_like(p) for p in parameters]
            for part, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
                for total, each in zip(
                    gradients, torch.autograd.grad(loss(model(part), target), parameters), strict=True
                ):
                    total += each
            values.append([g + e if feedback else g for g, e in zip(gradients, own, strict=True)])
        for at, parameter in enumerate(parameters):
            total, sent = plain([row[at] for row in values], kept[at])
            parameter.grad = total / len(inputs)
            for own, row, part in zip(left, values, sent, strict=True):
                own[at] = row[at] - part
        made.step()
    return {name: value.clone() for name, value in model.state_dict().items()}
