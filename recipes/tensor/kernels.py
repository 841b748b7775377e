"""What operators by one means or another keep and take: a small decoder, in turns in one process.

    python -m runner.recipes.tensor.kernels [--rounds N] [--write-readme]

Source of the means: torch.nn.attention.sdpa_kernel; Dao et al. 2022 (FlashAttention); torch.compile;
torch.nn.functional.linear_cross_entropy.
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

from runner.config.compose.resolve import resolve
from runner.model.layers import build_stage
from runner.model.load import load_model
from runner.profile import ModelProfile
from runner.profiling.model import profile_model
from runner.recipes.schedules.tables import replace_block
from runner.recipes.tensor.counted import Layout, Size, words

__all__ = ["compare", "main", "markdown"]

_MEANS = (
    "none", "attention eager", "attention fused", "norm fused", "elementwise eager", "elementwise fused", "loss fused",
    "fused",
)  # fmt: skip
_SIZE = Size(layers=2, width=256, sequence_length=256, vocab_size=4096, heads=8, samples=4)


def compare(size: Size, rounds: int, means: Sequence[str] = _MEANS) -> list[dict[str, Any]]:
    """A row for each means: bytes that a step saves, median seconds of a step, and how far gradients are off.

    Args:
        size: the model and the samples.
        rounds: how often each has its turn.
        means: a preset, or a switch and its value.
    """
    configs = {each: resolve([*_words(size), _override(each)]) for each in means}
    models = {each: load_model(config) for each, config in configs.items()}
    stages = {each: build_stage(model.layers, 0, len(model.layers) - 1) for each, model in models.items()}
    tokens = torch.randint(
        size.vocab_size, (size.samples, size.sequence_length), generator=torch.Generator().manual_seed(1)
    )
    seconds: dict[str, list[float]] = {each: [] for each in means}
    for _ in range(rounds + 1):
        for each, stage in stages.items():
            seconds[each].append(_step(stage, models[each].loss, tokens))
    gradients = {each: [p.grad for p in stage.parameters() if p.grad is not None] for each, stage in stages.items()}
    return [
        {
            "kernels": each,
            "saved": _saved(profile_model(configs[each])),
            "milliseconds": 1e3 * median(seconds[each][1:]),
            "off": max(_off(own, known) for own, known in zip(gradients[each], gradients["none"], strict=True)),
        }
        for each in means
    ]


def _words(size: Size) -> tuple[str, ...]:
    gpt, target = words(size, Layout(1)), "model.target=runner.recipes.tensor.gated:build"
    return *(("model=custom" if each == "model=gpt" else each) for each in gpt), target


def _override(means: str) -> str:
    switch, _, value = means.partition(" ")
    return f"kernels.{switch}={value}" if value else f"kernels={means}"


def _saved(profile: ModelProfile) -> int:
    return sum(layer.saved_bytes for layer in (*profile.layers, profile.loss))


def _step(model: nn.Module, loss: Any, tokens: Tensor) -> float:
    model.zero_grad()
    began = time.process_time()
    total, weight = loss(model(tokens), tokens)
    torch.autograd.backward(total / weight)
    return time.process_time() - began


def _off(own: Tensor, known: Tensor) -> float:
    return float((own - known).abs().max() / known.abs().max())


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    lines = ["| kernels | a step saves | processor time of a step | gradient off by |", "| --- | --- | --- | --- |"]
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
