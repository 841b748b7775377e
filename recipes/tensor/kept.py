"""What a decoder block keeps for its backward on each rank, counted on fake tensors, beside the published sums.

    python -m runner.recipes.tensor.kept [--write-readme]

Source of the terms: Korthikanti et al. 2022, section 4, which counts what each operator of a block keeps. Here a block
has RMS norms, fused attention with fewer heads of keys and values, and a gated feed-forward layer, in single precision.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from runner.config.compose.resolve import resolve
from runner.profiling.model import profile_model
from runner.recipes.schedules.tables import replace_block
from runner.recipes.tensor.counted import Layout

__all__ = ["build", "counted", "formula_bytes", "main", "markdown"]

_WIDTH, _FEED, _HEADS, _KEY_HEADS, _VOCABULARY = 128, 344, 8, 4, 64
_SAMPLES, _TOKENS = 4, 64
_FP32 = 4


class Block(nn.Module):
    """Grouped attention and a gated feed-forward layer; [samples, tokens, width] in and out."""

    def __init__(self) -> None:
        super().__init__()
        few = _WIDTH * _KEY_HEADS // _HEADS
        self.norm, self.feed_norm = nn.RMSNorm(_WIDTH), nn.RMSNorm(_WIDTH)
        self.query, self.out = nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.key, self.value = nn.Linear(_WIDTH, few, bias=False), nn.Linear(_WIDTH, few, bias=False)
        self.gate, self.up = nn.Linear(_WIDTH, _FEED, bias=False), nn.Linear(_WIDTH, _FEED, bias=False)
        self.down = nn.Linear(_FEED, _WIDTH, bias=False)

    @staticmethod
    def tensor_plan() -> dict[str, str]:
        """How the block is divided."""
        columns = dict.fromkeys(("query", "key", "value", "gate", "up"), "column")
        return {**columns, "out": "row", "down": "row"}

    def forward(self, hidden: Tensor) -> Tensor:
        given = self.norm(hidden)
        head = _WIDTH // _HEADS
        maps = self.query, self.key, self.value
        query, key, value = (each(given).unflatten(-1, (-1, head)).transpose(1, 2) for each in maps)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        fed = self.feed_norm(hidden)
        made: Tensor = hidden + self.down(functional.silu(self.gate(fed)) * self.up(fed))
        return made


def build() -> nn.Sequential:
    """Token ids [samples, tokens] to logits [samples, tokens, vocabulary]; two blocks."""
    return nn.Sequential(nn.Embedding(_VOCABULARY, _WIDTH), Block(), Block(), nn.Linear(_WIDTH, _VOCABULARY))


def formula_bytes(layout: Layout) -> float:
    """What a block keeps on each rank of a layout.

    In units of an activation [samples, tokens, width]: each of two norms keeps its input and what it has divided, the
    maps behind it their input. What lies between divided maps is divided: queries, keys, values, the attention's
    output, and four values of the feed-forward layer. Beside them, attention keeps a number for each token and head,
    norms one for each token. Divided tokens divide what norms keep, too, but for the norms' weights, of which a copy is
    kept whose gradient all ranks sum; the maps' input is gathered.
    """
    ranks = layout.tensor
    shared = _KEY_HEADS / _HEADS
    between = 2 + 2 * shared + 4 * _FEED / _WIDTH
    by_tokens = ranks if layout.sequence else 1
    units = 4 / by_tokens + 2 + between / ranks
    tokens = _SAMPLES * _TOKENS * _FP32
    weights = 2 * _WIDTH * _FP32 if layout.sequence else 0
    return tokens * (units * _WIDTH + _HEADS / ranks + 2 / by_tokens) + weights


def counted(layout: Layout) -> int:
    """Bytes that the second block saves for its backward."""
    kwargs = {"sequence_length": _TOKENS, "vocab_size": _VOCABULARY}
    sizes = (*(f"data.kwargs.{name}={value}" for name, value in kwargs.items()), f"data.batch_size={_SAMPLES}")
    own = ("model=custom", "model.target=runner.recipes.tensor.kept:build", "data=random_tokens")
    words = (*own, *sizes, "loss=token_cross_entropy", "hardware=laptop_cpu", *layout.overrides)
    return profile_model(resolve(list(words))).layers[2].saved_bytes


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    lines = ["| layout | a block keeps, counted | by formula |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {row['layout']} | {row['counted']:,} | {row['formula']:,.0f} |" for row in rows)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-readme", action="store_true", help="put the table into the README")
    asked = parser.parse_args(arguments)
    layouts = (Layout(1), Layout(2), Layout(4), Layout(2, sequence=True), Layout(4, sequence=True))
    rows = [{"layout": each.name, "counted": counted(each), "formula": formula_bytes(each)} for each in layouts]
    print(markdown(rows))
    if asked.write_readme:
        replace_block(Path(__file__).parent / "README.md", "kept", markdown(rows))


if __name__ == "__main__":
    main()
