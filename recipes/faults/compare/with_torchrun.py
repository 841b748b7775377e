"""A plain loop for torchrun that saves every few steps and goes on from its last checkpoint, as in torch's tutorial."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from runner.recipes.faults.compare.race import BATCH, RATE, Race, begins, data, ended, model

__all__ = ["main"]


def main(path: str) -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    race = Race.load(path)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = DistributedDataParallel(model(race.seconds))
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    saved = Path(race.folder, "last.pt")
    step = 0
    if saved.exists():
        content = torch.load(saved)
        net.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        step = content["step"]
    for inputs, targets in _batches(step, race.steps):
        begins(race, rank, step + 1)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
        step += 1
        ended(race, rank, step)
        if step % race.every == 0 and rank == 0:
            content = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(content, saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
    dist.destroy_process_group()


def _batches(first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
    dataset = data()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    step = 0
    while True:
        sampler.set_epoch(step // len(loader))
        for inputs, targets in loader:
            if step >= last:
                return
            if step >= first:
                yield inputs, targets
            step += 1


if __name__ == "__main__":
    main(sys.argv[1])
