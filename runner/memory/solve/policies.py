"""Activation-checkpoint policies: each turns one stage into segments.

A solver is a function of a :class:`StageChain` and :class:`PolicyOptions`; adding one to :data:`SOLVERS` is all it
takes to be planned and installed. The layer is the finest grain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from runner.errors import Problem, did_you_mean
from runner.memory.solve.values import ActivationPlan, PolicyOptions, Segment, StageChain
from runner.profile import ModelProfile

__all__ = ["SOLVERS", "Solver", "policy_problems", "solve"]

Solver = Callable[[StageChain, PolicyOptions], tuple[Segment, ...]]

_PATH = "activation_checkpoint.layers"
_SHOWN = 12


def solve(
    profile: ModelProfile, partition: Sequence[tuple[int, int]], options: PolicyOptions, *, to_host: bool = False
) -> ActivationPlan:
    """The policy's segments for every stage.

    Args:
        profile: of the whole model.
        partition: first and last layer of each stage, inclusive.
        options: the policy; it must have no :func:`policy_problems`.
        to_host: see :class:`ActivationPlan`.
    """
    solver = SOLVERS[options.name]
    names = [layer.name for layer in profile.layers]
    if options.layers is not None:
        found = (_index(asked, names) for asked in options.layers)
        options = replace(options, layers=tuple(str(index) for index in found if index is not None))
    chains = (StageChain(first, profile.layers[first : last + 1]) for first, last in partition)
    return ActivationPlan(tuple(solver(chain, options) for chain in chains), to_host)


def policy_problems(options: PolicyOptions, layer_names: Sequence[str]) -> list[Problem]:
    """What a policy asks of layers that the model does not have."""
    problems = []
    for asked in options.layers or ():
        if _index(asked, layer_names) is None:
            near = did_you_mean(asked, layer_names)
            fix = f"{_PATH}=[{near}]" if near is not None else ""
            problems.append(Problem(_PATH, asked, "must name layers of the model", _known(layer_names), fix))
    return problems


def _known(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return f"It has {len(names)}: {shown}; an index from 0 to {len(names) - 1} will do too"


def _index(asked: str, names: Sequence[str]) -> int | None:
    """A name wins over an index: layers of an ``nn.Sequential`` are named by numbers that are their indices anyway."""
    if asked in names:
        return list(names).index(asked)
    return int(asked) if asked.isdecimal() and int(asked) < len(names) else None


def _none(stage: StageChain, options: PolicyOptions) -> tuple[Segment, ...]:
    return (Segment(stage.first, stage.last),)


def _full(stage: StageChain, options: PolicyOptions) -> tuple[Segment, ...]:
    return tuple(Segment(layer, layer, recompute=True) for layer in _indices(stage))


def _periodic(stage: StageChain, options: PolicyOptions) -> tuple[Segment, ...]:
    """Chen et al. 2016 with a given period: the input of every k-th layer is kept, counted from the stage's first."""
    every = options.every or 1
    starts = range(stage.first, stage.last + 1, every)
    return tuple(Segment(start, min(start + every - 1, stage.last), recompute=True) for start in starts)


def _selective(stage: StageChain, options: PolicyOptions) -> tuple[Segment, ...]:
    return tuple(Segment(layer, layer, recompute=True, save_ops=options.save_ops) for layer in _indices(stage))


def _manual(stage: StageChain, options: PolicyOptions) -> tuple[Segment, ...]:
    chosen = set(options.layers or ())  # indices by now: see solve
    return tuple(Segment(layer, layer, recompute=str(layer) in chosen) for layer in _indices(stage))


def _indices(stage: StageChain) -> range:
    return range(stage.first, stage.last + 1)


SOLVERS: Mapping[str, Solver] = {
    "none": _none,
    "full": _full,
    "periodic": _periodic,
    "selective": _selective,
    "manual": _manual,
}
