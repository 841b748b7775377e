"""Wraps the layers of a stage as its part of an activation plan says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from pkgutil import resolve_name
from typing import Any

import torch

from runner.memory.apply.mover import Mover, Moving
from runner.memory.apply.recompute import Recompute
from runner.memory.apply.trip import MovedStage, Saving
from runner.memory.apply.weight_swap import HostWeights, UsingWeights, WeightSwap
from runner.memory.solve.values import ChainProgram, Program, Segment, StageProgram
from runner.model.layers import Part, StageModule

__all__ = ["StageOffload", "install", "install_swap"]


class StageOffload:
    """What moves the saved tensors of a rank's stages to the host's memory.

    Args:
        mover: moves them.

    Attributes:
        stages: the stages with moved segments.
    """

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.stages: dict[StageModule, MovedStage] = {}


def install(
    stage: StageModule,
    program: Program,
    *,
    to_host: bool = False,
    moving: Moving = nullcontext,
    offload: StageOffload | None = None,
) -> None:
    """Make a stage drop, keep and move saved tensors as planned; its outputs and gradients stay the same bits.

    A segment inside another one is a checkpoint inside a checkpoint; other programs name what installs them. The
    stage's autograd graph is always that of the first forward, so gradients are added up in the same order as without a
    plan.

    Args:
        stage: the stage's module; it must be on its device already.
        program: the stage's program.
        to_host: whether saved tensors are moved to the host's memory and fetched back in the backward.
        moving: makes the context in which a tensor is moved, which measures how long that takes.
        offload: takes note of the stage if the program has moved segments; needed for these.
    """
    if isinstance(program, StageProgram):
        assert not to_host  # a rule refuses it
        resolve_name(program.installer)(stage, program)
        return
    stage.wrap(_chain_parts(stage, program, offload), _SaveOnCpu(stage, moving) if to_host else None)


def install_swap(
    stage: StageModule,
    program: ChainProgram,
    swap: WeightSwap,
    units: Mapping[tuple[int, int], HostWeights],
    offload: StageOffload | None = None,
) -> None:
    """Make a stage use weights that come and go; :func:`install` has been called.

    Args:
        stage: the stage's module.
        program: the stage's program.
        swap: moves the weights.
        units: the stage's units, by their first and last layer; a unit is made of whole segments of the program, or of
            layers of those that keep what they save.
        offload: what moves saved tensors; None: nothing does.
    """
    ends = {first for first, _ in units} | {last + 1 for _, last in units}
    moved = offload.stages.get(stage) if offload is not None else None

    def using(part: Part) -> Part:
        for (first, last), unit in units.items():
            if first <= part.first and part.last <= last:
                return replace(part, around=UsingWeights(swap, unit, part, moved))
        return part

    made: list[Part] = []
    for part, segment in zip(_parts(stage, program), program, strict=True):
        pieces = [using(piece) for piece in ([part] if segment.recompute else _cut(part, ends))]
        if moved is not None:
            pieces = [_saving(piece, segment, moved, is_last=piece.last == program[-1].last) for piece in pieces]
        made += pieces
    stage.wrap(made)


def _cut(part: Part, starts: Collection[int]) -> list[Part]:
    """The pieces of a part that runs plainly, of which each begins at its beginning or at one of these layers."""
    firsts = [part.first, *(at for at in range(part.first + 1, part.last + 1) if at in starts)]
    return [Part(first, last - 1) for first, last in zip(firsts, [*firsts[1:], part.last + 1], strict=True)]


def _chain_parts(stage: StageModule, program: ChainProgram, offload: StageOffload | None) -> tuple[Part, ...]:
    parts = _parts(stage, program)
    if not any(segment.moved for segment in program):
        return parts
    if offload is None:
        raise ValueError("the program moves saved tensors, and nothing is given that moves them")
    moved = offload.stages[stage] = MovedStage()
    return tuple(
        _saving(part, segment, moved, is_last=segment is program[-1])
        for part, segment in zip(parts, program, strict=True)
    )


def _saving(part: Part, segment: Segment, moved: MovedStage, *, is_last: bool) -> Part:
    """The part, taking part in the trips of its stage; so do parts that stay, because they share memory with others."""
    saving = Saving(moved, moved=segment.moved, one_by_one=segment.one_by_one, is_last=is_last, around=part.around)
    return replace(part, around=saving)


def _parts(stage: StageModule, program: ChainProgram) -> tuple[Part, ...]:
    return tuple(Part(each.first, each.last, _around(stage, each), _parts(stage, each.inside)) for each in program)


def _around(stage: StageModule, segment: Segment) -> Recompute | None:
    if not segment.recompute:
        return None
    return Recompute(stage.layers_between(segment.first, segment.last), segment.save_ops)


class _SaveOnCpu:
    """Runs a stage under ``torch.autograd.graph.save_on_cpu``, which moves every saved tensor synchronously.

    A part that is computed again saves only its input, so only that input moves. If the device is the CPU,
    ``tensor.cpu()`` is the tensor itself: nothing moves, and nothing is copied. What is measured then is the time of
    the hooks' calls.
    """

    def __init__(self, stage: StageModule, moving: Moving) -> None:
        self._stage = stage
        self._moving = moving

    def __call__(self, run: Callable[[Any], Any], value: Any, *, seeded: bool) -> Any:
        if not torch.is_grad_enabled():
            return run(value)
        on_cuda = any(parameter.is_cuda for parameter in self._stage.parameters())
        hooks: Any = torch.autograd.graph.save_on_cpu(pin_memory=on_cuda)
        hooks.pack_hook, hooks.unpack_hook = self._measured(hooks.pack_hook), self._measured(hooks.unpack_hook)
        with hooks:
            return run(value)

    def _measured(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(hook)
        def measured(value: Any) -> Any:
            with self._moving():
                return hook(value)

        return measured
