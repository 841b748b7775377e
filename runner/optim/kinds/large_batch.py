"""LARS and LAMB from pytorch_optimizer, with repairs for checkpoints by parameter, and for parts of weights."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_optimizer import LARS as _Lars
from pytorch_optimizer import Lamb as _Lamb
from torch import Tensor

from runner.optim.states.whole_norms import WholeNorms

__all__ = ["LARS", "Lamb"]

_OF_ONE_STEP = ("weight_norm", "adam_norm", "trust_ratio")  # the library leaves them in the state for inspection only


class LARS(_Lars):
    """The library's LARS, with the norms of whole weights where ranks have parts of them."""

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        with WholeNorms():
            return super().step(*args, **kwargs)


class Lamb(_Lamb):
    """The library's LAMB with weight decay inside the update whose length is adapted, as published.

    The library counts the steps of a group in the group. A checkpoint holds states by parameter, and stages may be
    updated one by one, so here each parameter keeps the count, and those that are updated together have the same.
    """

    def __init__(self, parameters: list[Tensor], **settings: Any) -> None:
        super().__init__(parameters, **settings, weight_decouple=False)

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        updated = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for group, members in zip(self.param_groups, updated, strict=True):
            counts = [self.state[p]["step"] for p in members if "step" in self.state.get(p, {})]
            group["step"] = int(max(counts, default=0))
        with WholeNorms():
            result = super().step(*args, **kwargs)
        for group, members in zip(self.param_groups, updated, strict=True):
            for state in (self.state[p] for p in members):
                state["step"] = torch.tensor(float(group["step"]))
                for name in _OF_ONE_STEP:
                    state.pop(name, None)
        return result
