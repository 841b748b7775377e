"""Torch's Muon for matrices, and AdamW for all other weights, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim import Muon as TorchMuon
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from runner.optim.states.whole_norms import PartOfWeight, part_of

__all__ = ["Muon"]

_MATRIX = 2
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
            for weight in group["params"]:
                held = part_of(weight)
                if held is not None and _is_matrix(weight):
                    _update_part(weight, held, self.state[weight], group)
        return result


def _is_matrix(weight: Tensor) -> bool:
    return weight.grad is not None and weight.dim() == _MATRIX


def _update_part(weight: Tensor, held: PartOfWeight, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Update a rank's part of a matrix as torch updates the whole one, in the settings that torch has by default.

    What is made orthogonal is put together in the 16 bits in which that is done, on every rank.
    """
    gradient = weight.grad
    assert gradient is not None
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
    whole = held.whole(gradient.lerp(momentum, group["momentum"]).bfloat16())
    made = _zeropower_via_newtonschulz(whole, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(held.own(made), alpha=-_adjust_lr(group["lr"], _RATE, whole.shape))


def _parts(group: dict[str, Any]) -> Iterator[Optimizer]:
    """Torch's optimizers of a group's whole matrices and of its other weights; they are made anew, without states."""
    weights = [weight for weight in group["params"] if weight.grad is not None]
    matrices = [each for each in weights if _is_matrix(each) and part_of(each) is None]
    others = [each for each in weights if not _is_matrix(each)]
    both = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    if matrices:
        yield TorchMuon(matrices, momentum=group["momentum"], adjust_lr_fn=_RATE, **both)
    if others:
        yield AdamW(others, betas=group["betas"], eps=group["eps"], **both)
