"""Two replicas' 1-bit Adam by hand: whole gradients at first, and signs with what they leave over after that."""

from __future__ import annotations

import torch
import user_code
import zero_model
from narrow import present
from reference import accumulate, microbatches
from torch import Tensor, nn
from user_project import plain_batches

BETAS, EPS, LR, FREEZE = (0.9, 0.98), 1e-3, 1e-3, 2


def parts_of_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[list[Tensor], float]:
    """Of each replica: its gradients, as parts of the mean over all samples."""
    inputs, targets = (microbatches(each, 2, 2) for each in batch)
    found = [
        accumulate(model, user_code.mean, list(zip(inputs[2 * r : 2 * r + 2], targets[2 * r : 2 * r + 2], strict=True)),
                   torch.float32)
        for r in range(2)
    ]  # fmt: skip
    weight = sum(part[1] for part in found)
    flat = [torch.cat([present(gradient).flatten() for gradient in part[2]]) / weight for part in found]
    return flat, sum(part[0] for part in found) / weight


class PlainOneBit:
    """Two replicas' 1-bit Adam over one flat vector, whose chunks are its halves; scales are of 1024 elements."""

    def __init__(self, sizes: list[int]) -> None:
        total = sum(sizes)
        self.half = -(-total // 16) * 8
        self.m, self.v = torch.zeros(total), torch.zeros(total)
        self.worker, self.server = [torch.zeros(total), torch.zeros(total)], torch.zeros(total)
        ends = torch.tensor([0, *sizes, 0]).cumsum(0).tolist()[:-1]
        parts = sorted({*ends, self.half})
        self.cuts = sorted({*parts, *(at for a, b in zip(parts, parts[1:], strict=False) for at in range(a, b, 1024))})

    def signs(self, z: Tensor) -> Tensor:
        made = torch.zeros_like(z)
        for a, b in zip(self.cuts, self.cuts[1:], strict=False):
            counted = (self.v[a:b] > 0).sum().clamp(min=1)
            made[a:b] = torch.where(z[a:b] >= 0, 1.0, -1.0) * (z[a:b].abs().sum() / counted)
        return made * (self.v > 0)

    def update(self, parts: list[Tensor], step: int) -> Tensor:
        beta1, beta2 = BETAS
        if step < FREEZE:
            mean = parts[0] + parts[1]
            self.m = beta1 * self.m + (1 - beta1) * mean
            self.v = beta2 * self.v + (1 - beta2) * mean * mean
        else:
            told = []
            for replica, part in enumerate(parts):
                z = (beta1 * self.m + (1 - beta1) * 2 * part + self.worker[replica]) * (self.v > 0)
                told.append(self.signs(z))
                self.worker[replica] = z - told[-1]
            z = (told[0] + told[1]) / 2 + self.server
            self.m = self.signs(z)
            self.server = z - self.m
        return LR * self.m / (self.v.sqrt() + EPS)


def plain_onebit() -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = zero_model.model()
    parameters = list(model.parameters())
    plain = PlainOneBit([p.numel() for p in parameters])
    losses: list[float] = []
    for step, batch in enumerate(plain_batches()):
        parts, loss = parts_of_step(model, batch)
        change = plain.update(parts, step)
        with torch.no_grad():
            for p, one in zip(parameters, torch.split(change, [p.numel() for p in parameters]), strict=True):
                p.sub_(one.view_as(p))
        losses.append(loss)
    return losses, model.state_dict()
