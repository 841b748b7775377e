"""AdaBelief from pytorch_optimizer, with a count of steps that every weight keeps for itself."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_optimizer import AdaBelief as _AdaBelief
from torch import Tensor

__all__ = ["AdaBelief"]


class AdaBelief(_AdaBelief):
    """The library's AdaBelief with decoupled weight decay.

    The library counts the steps of a group in the group. A checkpoint holds states by parameter, and stages may be
    updated one by one, so here each parameter keeps the count, and those that are updated together have the same.
    """

    def __init__(self, parameters: list[Tensor], **settings: Any) -> None:
        super().__init__(parameters, **settings, weight_decouple=True)
        for group in self.param_groups:
            group["foreach"] = False  # else two tensors of every weight are there at once; the numbers are the same

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        updated = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for group, members in zip(self.param_groups, updated, strict=True):
            counts = [self.state[p]["step"] for p in members if "step" in self.state.get(p, {})]
            group["step"] = int(max(counts, default=0))
        result = super().step(*args, **kwargs)
        for group, members in zip(self.param_groups, updated, strict=True):
            for parameter in members:
                self.state[parameter]["step"] = torch.tensor(float(group["step"]))
        return result
