"""Adam whose replicas exchange momentum in bits: 1-bit Adam and 0/1 Adam, and what 1-bit LAMB shares with them.

At a full step gradients are means over replicas, as for any optimizer, and the variance takes them in. At a compressed
one the variance stays, and each replica adds its own gradients to the momentum, whose mean is taken by
:class:`SignCompression`. Biases are not corrected. The kinds differ in which steps are full, and in the update.

Elements whose variance is zero have not had a gradient yet: dividing by it would send them anywhere, and the scale of
their tensor would move them. They are masked: their momentum stays zero, and until a full step they do not learn.

Source: Tang et al. 2021, "1-bit Adam"; deepspeed/runtime/fp16/onebit/adam.py before 0.19.7. DeepSpeed's first step only
makes the states; here it updates as well.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.optim.compression.signs import Alone, Exchange, SignCompression

__all__ = ["OneBitAdam", "OneBitOptimizer", "ZeroOneAdam"]


class OneBitOptimizer(Optimizer):
    """See the module's text. All parameters are on one device and in one group.

    Args:
        parameters: fp32.
        lr, betas, eps: Adam's.
        weight_decay: decoupled.
        freeze_step: from this step on, counted from 0, every step is compressed.
    """

    option: str
    """What ``optimizer=`` calls it."""

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    """What is kept of every element, in fp32."""

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
        """Set who the replicas are, before the first step."""
        self._exchange = exchange
        self._compression = None

    @property
    def num_replicas(self) -> int:
        """Whom momentum is exchanged with, this one included."""
        return self._exchange.size

    @property
    def compresses(self) -> bool:
        """Whether the next step exchanges momentum, so that gradients are to be this replica's own."""
        return self._steps >= self._freeze_step

    @property
    def compression(self) -> SignCompression:
        """The errors; made when they are first asked for."""
        if self._compression is None:
            held = self._held()
            self._compression = SignCompression([p.numel() for p in held], self._exchange, held[0].device)
        return self._compression

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update from ``grad``: the mean over replicas, or where :attr:`compresses` this replica's part of it."""
        result = closure() if closure is not None else None
        compression, compresses = self.compression, self.compresses
        held = self._held()
        for parameter in held:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                for name in self.state_names:
                    state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            state["step"] += 1
            self._accumulate(parameter, state, compressed=compresses)
        if compresses:
            self._take_mean(compression, held)
        for parameter in held:
            self._update(parameter, self.state[parameter], compressed=compresses)
        return result

    def _accumulate(self, parameter: Tensor, state: dict[str, Any], *, compressed: bool) -> None:
        if parameter.grad is None:
            return
        first, second = self.param_groups[0]["betas"]
        gradient = parameter.grad.float()
        # A replica's part of the mean is a replica's share of the sum: the mean of these is the sum again.
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
        """Move a weight along the replicas' momentum."""

    def _held(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def _steps(self) -> int:
        state = self.state.get(self._held()[0])
        return int(state["step"]) if state else 0


class OneBitAdam(OneBitOptimizer):
    """Full steps until ``freeze_step``, compressed ones from it on."""

    option = "onebit_adam"

    def _update(self, parameter: Tensor, state: dict[str, Any], *, compressed: bool) -> None:
        group = self.param_groups[0]
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        if group["weight_decay"]:
            update.add_(parameter, alpha=group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])


class ZeroOneAdam(OneBitAdam):
    """Full steps at growing intervals until ``freeze_step``: the j-th and the next lie 2^(j // refreshes) apart.

    Every compressed step is exchanged: the paper's local steps, between which replicas would have other weights, are
    left out. DeepSpeed exchanges gradients in bits until the freeze, the paper's algorithm momenta, as here.

    Args:
        refreshes: full steps before the interval doubles; the paper's kappa.

    Source: Lu et al. 2023, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", algorithm 1
    with a synchronisation at every step; deepspeed/runtime/fp16/onebit/zoadam.py before 0.19.7.
    """

    option = "zero_one_adam"

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
