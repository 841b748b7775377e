"""The strategy that computes again the layers that a user names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.errors import Problem, did_you_mean
from runner.memory.solve.strategy import Strategy
from runner.memory.solve.values import ChainProgram, Segment, StageChain
from runner.options import Option

__all__ = ["STRATEGY"]

_PATH = "activation_checkpoint.layers"
_SHOWN = 12


def _solve(chain: StageChain) -> ChainProgram:
    names = [layer.name for layer in chain.profile.layers]
    chosen = {_index(asked, names) for asked in chain.options["layers"]}
    return tuple(Segment(layer, layer, recompute=layer in chosen) for layer in chain.indices)


def _index(asked: str, names: Sequence[str]) -> int | None:
    """The index of a layer given by name or index. A name wins: in an ``nn.Sequential`` names are indices anyway."""
    if asked in names:
        return list(names).index(asked)
    return int(asked) if asked.isdecimal() and int(asked) < len(names) else None


def _model_problems(options: Mapping[str, Any], names: Sequence[str]) -> list[Problem]:
    problems = []
    for asked in options.get("layers", ()):
        if _index(asked, names) is None:
            near = did_you_mean(asked, names)
            fix = f"{_PATH}=[{near}]" if near is not None else ""
            problems.append(Problem(_PATH, asked, "must name layers of the model", _known(names), fix))
    return problems


def _known(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return f"It has {len(names)}: {shown}; an index from 0 to {len(names) - 1} will do too"


STRATEGY = Strategy(
    "manual",
    _solve,
    source="torch.utils.checkpoint",
    about="the layers that are named are run forward again in their backward",
    options=(
        Option(
            "layers",
            list[str],
            "names or indices of the layers that are computed again",
            example="[0]",
            rule="must name at least one layer",
            breaks=lambda layers: not layers,
            fix="activation_checkpoint=none",
        ),
    ),
    model_problems=_model_problems,
)
