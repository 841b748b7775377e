"""A stream of random samples that can say and load its place, and tells a file which samples are read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

COUNT = 100


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Numbers are written to the file ``NUMBERS_READ``, if the environment names one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.inputs = torch.randn(COUNT, 6, generator=generator)
        self.targets = torch.randn(COUNT, 3, generator=generator)
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.at, self.begin = self.begin, 0
        while self.at < COUNT:
            number, self.at = self.at, self.at + 1
            if "NUMBERS_READ" in os.environ:
                with open(os.environ["NUMBERS_READ"], "a") as file:
                    file.write(f"{number}\n")
            yield self.inputs[number] + 0.1 * torch.rand(()), self.targets[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


def stream() -> Stream:
    return Stream()


def model() -> nn.Sequential:
    """Without dropout, whose masks follow the number of micro-batches and replicas."""
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))
