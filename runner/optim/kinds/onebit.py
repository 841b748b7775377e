"""Adam whose replicas exchange momentum in bits, with or without refreshes, and the common part with 1-bit LAMB.

At a full step, gradients are means over replicas, as for any optimizer, and the variance is updated with them. At a
compressed step the variance does not change; each replica adds its own gradients to the momentum, whose mean is taken
by :class:`SignCompression`. There is no bias correction. The kinds differ in which steps are full, and in the update.

Elements whose variance is zero have not had a gradient yet. The scale of their block would give them a momentum, and
division by that variance would make their update arbitrarily large. So they are masked: their momentum stays zero, and
they do not learn until a full step.

Source: Tang et al. 2021, "1-bit Adam"; deepspeed/runtime/fp16/onebit/adam.py before 0.19.7. DeepSpeed's first step only
creates the states; here it also updates the weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.optim.compression.signs import Alone, Exchange, SignCompression

__all__ = ["OneBitAdam", "OneBitOptimizer", "RefreshedOneBitAdam"]


class OneBitOptimizer(Optimizer):
    """The common part of 1-bit optimizers, see the module's text. All parameters are on one device and in one group.

    Args:
        parameters: weights in fp32.
        lr, betas, eps: the same as for Adam.
        weight_decay: decoupled.
        freeze_step: from this step on, counted from 0, every step is compressed.
    """

    option: str
    """Its name as a value of ``optimizer=``."""

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    """The states that are kept for every element, in fp32."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        freeze_step: int,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._freeze_step = freeze_step
        self._exchange: Exchange = Alone()
        self._compression: SignCompression | None = None

    def attach(self, exchange: Exchange) -> None:
        """Set the exchange with the other replicas, before the first step."""
        self._exchange = exchange
        self._compression = None

    @property
    def num_replicas(self) -> int:
        """Number of replicas that exchange momentum, including this one."""
        return self._exchange.size

    @property
    def compresses(self) -> bool:
        """Whether the next step exchanges momentum; its gradients must then be those of this replica alone."""
        return self._steps >= self._freeze_step

    @property
    def compression(self) -> SignCompression:
        """The compression with its errors, which are made at first use."""
        if self._compression is None:
            held = self._held()
            self._compression = SignCompression([p.numel() for p in held], self._exchange, held[0].device)
        return self._compression

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update from ``grad``: the mean over replicas, or, if :attr:`compresses`, this replica's part of it."""
        result = closure() if closure is not None else None
        compression, compresses = self.compression, self.compresses
        held = self._held()
        for parameter in held:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.int64)  # a rehearsal keeps whole numbers real
                for name in self.state_names:
                    state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            state["step"] += 1
            self._accumulate(parameter, state, compressed=compresses)
        if compresses:
            self._take_mean(compression, held)
        for parameter in held:
            if parameter.grad is not None:
                self._update(parameter, self.state[parameter], compressed=compresses)
        return result

    def _accumulate(self, parameter: Tensor, state: dict[str, Any], *, compressed: bool) -> None:
        if parameter.grad is None:
            return
        first, second = self.param_groups[0]["betas"]
        gradient = parameter.grad.float()
        # The gradients are this replica's part of a sum. Times the number of replicas, their mean is that sum.
        share = self._exchange.size if compressed else 1
        state["exp_avg"].mul_(first).add_(gradient, alpha=(1 - first) * share)
        if not compressed:
            state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)

    def _take_mean(self, compression: SignCompression, held: Sequence[Tensor]) -> None:
        momentum = torch.cat([self.state[p]["exp_avg"].flatten() for p in held])
        mask = torch.cat([self.state[p]["exp_avg_sq"].flatten() > 0 for p in held])
        compression.mean(momentum, mask)
        for parameter, part in zip(held, torch.split(momentum, [p.numel() for p in held]), strict=True):
            self.state[parameter]["exp_avg"].copy_(part.view_as(parameter))

    @abstractmethod
    def _update(self, parameter: Tensor, state: dict[str, Any], *, compressed: bool) -> None:
        """Update a weight with the momentum, which is the mean over replicas."""

    def _held(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def _steps(self) -> int:
        state = self.state.get(self._held()[0])
        return int(state["step"]) if state else 0


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam: full steps before ``freeze_step``, compressed steps from it on."""

    option = "onebit_adam"

    def _update(self, parameter: Tensor, state: dict[str, Any], *, compressed: bool) -> None:
        group = self.param_groups[0]
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        if group["weight_decay"]:
            update.add_(parameter, alpha=group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])


class RefreshedOneBitAdam(OneBitAdam):
    """Until ``freeze_step`` there are full steps; the j-th and the next are 2^(j // refreshes) steps apart.

    That is how 0/1 Adam refreshes its variance. Every compressed step exchanges momenta: 0/1 Adam's local steps, during
    which weights differ between replicas, are left out. Until the freeze, DeepSpeed exchanges gradients in bits; the
    paper's algorithm exchanges momenta, as here.

    Args:
        refreshes: number of full steps before the interval doubles; the paper's kappa.

    Source: Lu et al. 2023, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", algorithm 1
    with a synchronisation at every step; deepspeed/runtime/fp16/onebit/zoadam.py before 0.19.7.
    """

    option = "onebit_adam_refreshed"

    def __init__(self, parameters: Iterable[Tensor], *, refreshes: int, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self._refreshes = refreshes

    @property
    def compresses(self) -> bool:
        return super().compresses or not self._refreshes_at(self._steps)

    def _refreshes_at(self, step: int) -> bool:
        interval = 1
        while step >= self._refreshes * interval:
            step -= self._refreshes * interval
            interval *= 2
        return step % interval == 0
