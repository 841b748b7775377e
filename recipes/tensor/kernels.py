"""What attention by one means or another keeps and takes: blocks of a GPT, in turns in one process.

    python -m runner.recipes.tensor.kernels [--rounds N] [--write-readme]

Source of the means: torch.nn.attention.sdpa_kernel; Dao et al. 2022 (FlashAttention).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.config.compose.resolve import resolve
from runner.model.layers import build_stage
from runner.model.load import load_model
from runner.profiling.model import profile_model
from runner.recipes.schedules.tables import replace_block
from runner.recipes.tensor.counted import Layout, Size, words

__all__ = ["compare", "main", "markdown"]

_MEANS = ("none", "eager", "fused")
_SIZE = Size(layers=2, width=256, sequence_length=256, vocab_size=512, heads=8, samples=4)


def compare(size: Size, rounds: int) -> list[dict[str, Any]]:
    """A row for each means: bytes that a block saves, median seconds of a step, and how far gradients are off.

    Args:
        size: the model and the samples.
        rounds: how often each has its turn.
    """
    configs = {each: resolve([*words(size, Layout(1)), f"kernels={each}"]) for each in _MEANS}
    models = {each: _whole(config) for each, config in configs.items()}
    tokens = torch.randint(
        size.vocab_size, (size.samples, size.sequence_length), generator=torch.Generator().manual_seed(1)
    )
    seconds: dict[str, list[float]] = {each: [] for each in _MEANS}
    for _ in range(rounds + 1):
        for each, model in models.items():
            seconds[each].append(_step(model, tokens))
    gradients = {each: [p.grad for p in model.parameters() if p.grad is not None] for each, model in models.items()}
    return [
        {
            "kernels": each,
            "saved": profile_model(configs[each]).layers[1].saved_bytes,
            "milliseconds": 1e3 * median(seconds[each][1:]),
            "off": max(_off(own, known) for own, known in zip(gradients[each], gradients["none"], strict=True)),
        }
        for each in _MEANS
    ]


def _whole(config: Any) -> nn.Module:
    layers = load_model(config).layers
    return build_stage(layers, 0, len(layers) - 1)


def _step(model: nn.Module, tokens: Tensor) -> float:
    model.zero_grad()
    began = time.process_time()
    torch.autograd.backward(functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    return time.process_time() - began


def _off(own: Tensor, known: Tensor) -> float:
    return float((own - known).abs().max() / known.abs().max())


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    lines = ["| kernels | a block saves | processor time of a step | gradient off by |", "| --- | --- | --- | --- |"]
    for row in rows:
        lines.append(f"| {row['kernels']} | {row['saved']:,} | {row['milliseconds']:.1f} ms | {row['off']:.0e} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each that are timed")
    parser.add_argument("--write-readme", action="store_true", help="put the table into the README")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = markdown(compare(_SIZE, asked.rounds))
    print(table)
    if asked.write_readme:
        replace_block(Path(__file__).parent / "README.md", "kernels", table)


if __name__ == "__main__":
    main()
