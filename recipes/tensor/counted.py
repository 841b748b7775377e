"""What ranks that divide a GPT exchange and keep, counted in runs, beside formulas.

Source of the formulas: Shoeybi et al. 2019, section 3 (sums of activations); Korthikanti et al. 2022, section 4.2.2
(the same bytes with divided tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.recipes.finetune.commands import train
from runner.record import RunRecord

__all__ = ["Layout", "Size", "counted", "formula_bytes", "layouts", "words"]

_FP32 = 4


@dataclass(frozen=True)
class Size:
    """Arguments of ``model=gpt``, and the samples of a step, which are one micro-batch."""

    layers: int = 4
    width: int = 64
    sequence_length: int = 64
    vocab_size: int = 512
    heads: int = 4
    samples: int = 8


@dataclass(frozen=True)
class Layout:
    """How many ranks divide each layer, and whether they divide the tokens between layers, too."""

    tensor: int
    sequence: bool = False

    @property
    def name(self) -> str:
        return f"tensor {self.tensor}{', sequence' if self.sequence else ''}"

    @property
    def overrides(self) -> tuple[str, ...]:
        return f"parallelism.tensor={self.tensor}", f"parallelism.sequence={str(self.sequence).lower()}"


def layouts() -> Iterator[Layout]:
    """One process, and two and four ranks without and with divided tokens."""
    yield Layout(1)
    for tensor in (2, 4):
        yield Layout(tensor)
        yield Layout(tensor, sequence=True)


def formula_bytes(size: Size, layout: Layout) -> float:
    """What all ranks together send in a step.

    A sum over t ranks of n bytes makes each of them send 2 (t - 1) / t n. With A bytes of an activation [samples,
    tokens, width] there are 2 L + 1 such sums forward and as many back: two for each of L blocks, one for the embedding
    or the head. The cross-entropy adds three numbers per target, of which the maximum is gathered. With divided tokens,
    a sum becomes two exchanges of half as many bytes each, and weights that all tokens share have their gradients
    summed: six vectors of a block, two of the head's norm; those of the positions are gathered.
    """
    ranks, tokens = layout.tensor, size.samples * size.sequence_length
    share = (ranks - 1) / ranks
    activation = tokens * size.width * _FP32
    numbers = tokens * _FP32
    sent = 2 * share * (2 * (2 * size.layers + 1) * activation + 2 * numbers) + share * ranks * numbers
    if layout.sequence:
        sent += 2 * share * (6 * size.layers + 2) * size.width * _FP32
        sent += share * size.sequence_length * size.width * _FP32
    return ranks * sent


def words(size: Size, layout: Layout) -> tuple[str, ...]:
    """The overrides of a run of two steps."""
    kwargs = (f"model.kwargs.{key}={value}" for key, value in asdict(size).items() if key != "samples")
    data = (f"data.kwargs.sequence_length={size.sequence_length}", f"data.kwargs.vocab_size={size.vocab_size}")
    common = ("model=gpt", *kwargs, "data=random_tokens", *data, "loss=token_cross_entropy", "trainer.max_steps=2")
    quiet = ("logger=none", "trainer.progress=false", "checkpoint=none", "device=cpu")
    return *common, *quiet, f"data.batch_size={size.samples}", *layout.overrides


def counted(size: Size, layout: Layout, folder: Path) -> dict[str, Any]:
    """A row of the table, of a run of two steps."""
    if not (folder / "record.json").exists():
        train(folder, *words(size, layout))
    record = RunRecord.load(folder)
    peaks = record.peak_memory_bytes
    return {
        "layout": layout.name,
        "sent": record.bytes_moved["tensor"],
        "formula": formula_bytes(size, layout) if layout.tensor > 1 else 0.0,
        "peak": max(peaks["measured"]),
        "planned": max(peaks["predicted"]),
        "loss": record.loss[-1],
    }
