"""Modules that ranks which divide layers run for a part of the batch each, with whole weights: one weird trick.

Where activations are many and weights few, as in convolutions, ranks compute their own samples and sum the gradients of
weights, as replicas do; divided layers behind them get all samples. What makes the region a region is its names:
consecutive layers of a Sequential that match are one, and any other module that matches is one by itself.

Source: Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from runner.errors import Problem
from runner.model.sharded.group import ShardGroup, group_of
from runner.model.sharded.operators import enter_alone, gather_slices, own_part
from runner.model.sharded.wrap import ShardedModule, become

__all__ = ["PATH", "slice_batches"]

PATH = "parallelism.batch_sliced"


class _Sliced(ShardedModule):
    """A module that runs for this rank's samples; all of them, where the ranks do not divide their number."""

    starts: bool
    ends: bool

    def forward(self, value: Tensor) -> Tensor:
        module: Any = self
        group = group_of(self.shard_group)
        if self.starts:
            group.is_slicing = value.dim() > 0 and len(value) > 0 and len(value) % group.degree == 0
            value = own_part(value, 0, group.name) if group.is_slicing else value
        if not group.is_slicing:
            return super().forward(value)  # type: ignore[misc, no-any-return]
        group.draw_apart(value.device)
        with _entered(module, group):
            made: Tensor = super().forward(value)  # type: ignore[misc]
        if self.ends:
            group.is_slicing = False
            return gather_slices(made, group.name)
        return made


@contextmanager
def _entered(module: nn.Module, group: ShardGroup) -> Iterator[None]:
    """The block, in which gradients of the module's weights are summed over the ranks."""
    own = [(each, dict(each._parameters)) for each in module.modules()]
    known: dict[int, Tensor] = {}
    for each, weights in own:
        for name, weight in weights.items():
            if weight is not None and weight.requires_grad:
                if id(weight) not in known:
                    known[id(weight)] = enter_alone(weight, group.name)
                each._parameters[name] = known[id(weight)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for each, weights in own:
            each._parameters.update(weights)


def slice_batches(
    named: Sequence[tuple[str, nn.Module]], patterns: Sequence[str], group: ShardGroup
) -> Iterator[tuple[str, Problem | None]]:
    """Let modules run for a part of the batch, in place.

    Args:
        named: global names, and whole models or layers.
        patterns: the names of such modules, in which ``*`` stands for a part between dots.
        group: the ranks.

    Yields:
        the pattern that fits a module, and what is wrong with it, if anything.
    """
    for name, module in named:
        yield from _sliced(name, module, patterns, group)


def _sliced(
    name: str, module: nn.Module, patterns: Sequence[str], group: ShardGroup
) -> Iterator[tuple[str, Problem | None]]:
    fitting = _fitting(name, patterns)
    if fitting is not None:
        yield fitting, _why_not(module, name)
        _become(module, group, starts=True, ends=True)
        return
    children = [(f"{name}.{local}" if name else local, each) for local, each in module.named_children()]
    in_line = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    fits = [_fitting(full, patterns) for full, _ in children]
    for at, (full, child) in enumerate(children):
        pattern = fits[at]
        if pattern is None or not in_line:
            yield from _sliced(full, child, patterns, group)
            continue
        yield pattern, _why_not(child, full)
        _become(
            child,
            group,
            starts=at == 0 or fits[at - 1] is None,
            ends=at + 1 == len(fits) or fits[at + 1] is None,
        )


def _become(module: nn.Module, group: ShardGroup, *, starts: bool, ends: bool) -> None:
    if not isinstance(module, ShardedModule):
        made = become(module, _Sliced, group)
        made.starts, made.ends = starts, ends


def _fitting(name: str, patterns: Sequence[str]) -> str | None:
    return next(
        (each for each in patterns if re.fullmatch(re.escape(each).replace(r"\*", r"[^.]+"), name) is not None), None
    )


def _why_not(module: nn.Module, name: str) -> Problem | None:
    """What is wrong with a module that is to see a part of the samples."""
    for local, each in module.named_modules():
        full = ".".join(part for part in (name, local) if part)
        rule = "must name modules that do with each sample what they do with all"
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            return Problem(PATH, name, rule, f"The {type(each).__name__} {full} takes statistics of the batch")
        if isinstance(each, ShardedModule):
            return Problem(PATH, name, rule, f"{full} is divided already by parallelism.sharding or a tensor_plan()")
    return None
