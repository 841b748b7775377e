"""The strategy that keeps the outputs of chosen operators and computes the cheap rest again."""

from __future__ import annotations

from runner.errors import did_you_mean
from runner.memory.solve.save_ops import PRESETS
from runner.memory.solve.strategy import Strategy
from runner.memory.solve.values import ChainProgram, Segment, StageChain
from runner.options import Option

__all__ = ["STRATEGY"]


def _solve(chain: StageChain) -> ChainProgram:
    preset = chain.options["save_ops"]
    return tuple(Segment(layer, layer, recompute=True, save_ops=preset) for layer in chain.indices)


STRATEGY = Strategy(
    "selective",
    _solve,
    source="Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models",
    about="every layer keeps its input and the outputs of chosen operators",
    options=(
        Option(
            "save_ops",
            str,
            f"operators whose outputs are kept: {', '.join(PRESETS)}",
            example="matmuls",
            rule=f"must be one of {', '.join(PRESETS)}",
            breaks=lambda preset: preset not in PRESETS,
            fix=lambda preset: did_you_mean(preset, PRESETS) or "",
        ),
    ),
    picks_operators=True,
)
