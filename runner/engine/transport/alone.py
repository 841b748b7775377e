"""The transport of a single rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runner.engine.transport.base import Transport

__all__ = ["AloneTransport"]


class AloneTransport(Transport):
    """The transport of a single rank, which has no peers."""

    def __init__(self, device: torch.device) -> None:
        self.rank = 0
        self.device = device

    def send(self, tensor: Tensor, peer: int, channel: Any) -> Any:
        raise RuntimeError("a single rank has no peer")

    receive = send  # type: ignore[assignment]  # the same answer

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Any:
        raise RuntimeError("a single rank has no replicas")

    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Any:
        raise RuntimeError("a single rank has nobody to gather from")

    def all_gather(self, tensor: Tensor, group: Sequence[int]) -> list[Tensor]:
        return [tensor]
