"""Adam with moments of few bits in blocks, with torchao's formats and its arithmetic for one weight.

torchao's optimizer compiles that arithmetic at its first use, and keeps moments as tensors of its own classes, which
cannot be copied and whose memory cannot be found. Here the arithmetic is called without compilation, and the state
holds plain tensors: codes, and the scale of each block. Tensors that torchao would not cut into blocks keep fp32
moments.

Source: torchao.optim (AdamW4bit, AdamWFp8); Li et al. 2023, "Memory Efficient Optimizers with 4-bit States".
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.noise import hide_noise
from runner.optim.blocks import BLOCK_4, BLOCK_FP8, SMALLEST_TORCHAO

hide_noise()  # torchao speaks at its import

import torchao.optim.adam as arithmetic  # noqa: E402
from torchao.optim.subclass_4bit import OptimState4bit  # noqa: E402
from torchao.optim.subclass_fp8 import OptimStateFp8  # noqa: E402

__all__ = ["Adam4bit", "AdamFp8"]

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name -> whether it has a sign


class _FewBitAdam(Optimizer):
    """The common part of both optimizers, see the module's text. Weight decay is decoupled.

    Args:
        parameters: weights of any floating-point format.
        lr, betas, eps, weight_decay: the same as for AdamW.
    """

    block: int
    """Number of elements that share a scale."""

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        result = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but codes keep their format; torch would convert them to the format of the weights."""
        super().load_state_dict({**state_dict, "state": {}})
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, entries in state_dict["state"].items():
            device = held[number].device
            self.state[held[number]] = {
                key: value if key == "step" else value.to(device, copy=True) for key, value in entries.items()
            }

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            self._start(parameter, state)
        state["step"] += 1
        moments = [self._moment(parameter, state, name) for name in _MOMENTS]
        # A tensor, as in torchao, because products with a number are rounded differently.
        rate = torch.tensor(group["lr"], dtype=torch.float32, device=parameter.device)
        arithmetic.single_param_adam(
            parameter,
            parameter.grad,
            state["step"],
            *moments,
            None,
            rate,
            *group["betas"],
            group["weight_decay"],
            group["eps"],
            IS_ADAMW=True,
            BF16_STOCHASTIC_ROUND=False,
        )

    def _start(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state["step"] = torch.zeros(())
        blocks, rest = divmod(parameter.numel(), self.block)
        for name in _MOMENTS:
            if rest or parameter.numel() < SMALLEST_TORCHAO:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            else:
                state[f"{name}_codes"] = self._no_codes(parameter)
                state[f"{name}_scale"] = torch.zeros(blocks, device=parameter.device)

    def _moment(self, parameter: Tensor, state: dict[str, Any], name: str) -> Tensor:
        """The tensor that torchao's arithmetic reads and writes; it uses the memory of the state's tensors."""
        if name in state:
            plain: Tensor = state[name]
            return plain
        return self._in_blocks(state[f"{name}_codes"], state[f"{name}_scale"], parameter.shape, _MOMENTS[name])

    @abstractmethod
    def _no_codes(self, parameter: Tensor) -> Tensor:
        """Make the codes of a parameter, bytes that are all zero."""

    @abstractmethod
    def _in_blocks(self, codes: Tensor, scale: Tensor, shape: torch.Size, signed: bool) -> Tensor:
        """Make torchao's tensor over codes and scale."""


class Adam4bit(_FewBitAdam):
    """Adam with two codes in a byte. A code is an index into a table of values; each moment has its own table."""

    block = BLOCK_4

    def __init__(self, parameters: Iterable[Tensor], **settings: Any) -> None:
        super().__init__(parameters, **settings)
        device = self.param_groups[0]["params"][0].device
        self._tables = {
            signed: OptimState4bit.zeros((BLOCK_4,), signed, BLOCK_4, device).qmap for signed in (True, False)
        }

    def _no_codes(self, parameter: Tensor) -> Tensor:
        return torch.zeros(parameter.numel() // 2, dtype=torch.uint8, device=parameter.device)

    def _in_blocks(self, codes: Tensor, scale: Tensor, shape: torch.Size, signed: bool) -> Tensor:
        made: Tensor = OptimState4bit(codes, scale, self._tables[signed], signed, shape)
        return made


class AdamFp8(_FewBitAdam):
    """Adam whose codes are numbers of 8 bits: float8_e4m3fn."""

    block = BLOCK_FP8

    def _no_codes(self, parameter: Tensor) -> Tensor:
        return torch.zeros(parameter.shape, dtype=torch.uint8, device=parameter.device)

    def _in_blocks(self, codes: Tensor, scale: Tensor, shape: torch.Size, signed: bool) -> Tensor:
        made: Tensor = OptimStateFp8(codes.view(torch.float8_e4m3fn), scale)
        return made
