"""Torch's Muon for matrices, and AdamW for all other weights, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim import Muon as TorchMuon

__all__ = ["Muon"]

_RATE = "match_rms_adamw"  # a step is as long as AdamW's, so that both may have one learning rate


class Muon(Optimizer):
    """Updates weights with two axes by Muon, and all others by AdamW, with the same rate and weight decay.

    Args:
        parameters: the weights.
        lr, weight_decay: the settings of both.
        momentum: the factor of Muon's momentum.
        betas, eps: the settings of AdamW alone.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the weights that have a gradient."""
        result = closure() if closure is not None else None
        for group in self.param_groups:
            for part in _parts(group):
                part.state = self.state
                part.step()
        return result


def _parts(group: dict[str, Any]) -> Iterator[Optimizer]:
    """Torch's optimizers of a group's matrices and of its other weights; they are made anew, without states."""
    weights = [weight for weight in group["params"] if weight.grad is not None]
    matrices, others = ([each for each in weights if (each.dim() == 2) is wanted] for wanted in (True, False))
    both = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    if matrices:
        yield TorchMuon(matrices, momentum=group["momentum"], adjust_lr_fn=_RATE, **both)
    if others:
        yield AdamW(others, betas=group["betas"], eps=group["eps"], **both)
