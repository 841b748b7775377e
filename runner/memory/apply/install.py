"""Put a stage's part of an activation plan around its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runner.memory.apply.recompute import Recompute
from runner.memory.solve.values import ChainProgram, Segment
from runner.model.layers import Part, StageModule

__all__ = ["install"]


def install(stage: StageModule, program: ChainProgram, *, to_host: bool = False) -> None:
    """Make a stage drop, keep and move saved tensors as planned; its outputs and gradients stay the same bits.

    A segment inside of another one is a checkpoint inside of a checkpoint. The stage's graph is that of the first
    forward at every depth, so that gradients are added up in the order in which they always are.

    Args:
        stage: on its device already.
        program: the stage's.
        to_host: saved tensors are moved to the host's memory and fetched back in the backward.
    """
    stage.wrap(_parts(stage, program), _SaveOnCpu(stage) if to_host else None)


def _parts(stage: StageModule, program: ChainProgram) -> tuple[Part, ...]:
    return tuple(Part(each.first, each.last, _around(stage, each), _parts(stage, each.inside)) for each in program)


def _around(stage: StageModule, segment: Segment) -> Recompute | None:
    if not segment.recompute:
        return None
    return Recompute(stage.layers_between(segment.first, segment.last), segment.save_ops)


class _SaveOnCpu:
    """``torch.autograd.graph.save_on_cpu`` around a stage: every saved tensor, synchronously.

    Inside of it, a part that is computed again saves its input only, which is then what moves. On a device that is the
    CPU ``tensor.cpu()`` is the tensor itself: nothing moves, and nothing is copied.
    """

    def __init__(self, stage: StageModule) -> None:
        self._stage = stage

    def __call__(self, run: Callable[[Any], Any], value: Any, *, seeded: bool) -> Any:
        if not torch.is_grad_enabled():
            return run(value)
        on_cuda = any(parameter.is_cuda for parameter in self._stage.parameters())
        with torch.autograd.graph.save_on_cpu(pin_memory=on_cuda):
            return run(value)
