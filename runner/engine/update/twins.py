"""Compares twins: copies of a stage on several ranks of a pipeline, which start equal and must stay equal.

They stay equal because they get the same summed gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from runner.engine.context import RankView
from runner.engine.transport.base import Transport
from runner.errors import Problem, RunFailedError
from runner.model.layers import StageModule, keeps_running_statistics
from runner.plan.rules.schedule import statistics_problems

__all__ = ["compare_twins", "running_statistics_problems"]

_MODULUS = (1 << 61) - 1


def compare_twins(view: RankView, stages: Mapping[int, StageModule], transport: Transport, step: int) -> None:
    """Compare checksums of all copies of each stage; all ranks of a pipeline must call it together.

    Raises:
        RunFailedError: twins differ; it is raised on every rank.
    """
    own = torch.zeros(view.num_stages, 2, dtype=torch.int64, device=transport.device)  # 1 if it is here; its checksum
    for stage, module in stages.items():
        own[stage] = torch.tensor([1, _checksum(module)])
    gathered = torch.stack(transport.all_gather(own, view.pipeline)).tolist()
    for stage in range(view.num_stages):
        sums = {rank: part[stage][1] for rank, part in zip(view.pipeline, gathered, strict=True) if part[stage][0]}
        if len(set(sums.values())) > 1:
            ranks = ", ".join(map(str, sums))
            raise RunFailedError(
                f"step {step}: the copies of stage {stage} on ranks {ranks} differ, though their gradients are summed: "
                "a layer changes its weights or buffers by itself, or a device computes wrongly"
            )


def _checksum(module: StageModule) -> int:
    """A checksum of all bits of the weights and buffers, tensor by tensor."""
    total = 0
    for tensor in (*module.parameters(), *module.buffers()):
        total = (31 * total + int(_bits(tensor.detach()).sum(dtype=torch.int64))) % _MODULUS
    return total


def _bits(tensor: Tensor) -> Tensor:
    """View the memory of a tensor as whole numbers."""
    flat = tensor.contiguous().view(-1)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
    return torch.view_as_real(flat).view(-1).view(width) if flat.is_complex() else flat.view(width)


def running_statistics_problems(view: RankView, stages: Mapping[int, StageModule], schedule: str) -> list[Problem]:
    """The problems of layers whose running statistics would differ between twins, which see different micro-batches."""
    names = [
        module.global_name(f"{path}.running_mean")
        for module in stages.values()
        for path, layer in module.named_modules()
        if view.has_twins and keeps_running_statistics(layer)
    ]
    return statistics_problems(schedule, names)
