"""The arenas of the models' tensors, from the lifetimes that a step has: what is alive, best fit, and the plan's.

python -m runner.recipes.offloading.arenas [--models GPT U-Net …] [--share S] [--link B] [--write-readme]
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.static_arena import ArenaFigures, TensorLife
from runner.memory.solve.strategies import STRATEGIES
from runner.model.live_tracker import LiveTracker
from runner.recipes.offloading.measure import Bench
from runner.recipes.rematerialization.models import MODELS, Task
from runner.recipes.schedules.tables import markdown_table, replace_block

__all__ = ["ArenaRow", "LifetimeTracker", "arena_rows", "main"]

_HEADER = ("model", "program", "tensors", "alive at once", "best fit", "arena", "best fit, of alive", "arena, of alive")
_LINK = 1e9


class LifetimeTracker(LiveTracker):  # type: ignore[no-untyped-call]  # torch's own base is not typed
    """Notes when each storage is made and when it is freed; a moment is one or the other."""

    def __init__(self) -> None:
        super().__init__()
        self._moment = 0
        self._born: list[tuple[int, int]] = []  # bytes and moment of each
        self._freed_at: dict[int, int] = {}

    @property
    def lives(self) -> list[TensorLife]:
        """The lifetimes so far; what is alive now is alive until the last moment."""
        end = self._moment + 1
        return [TensorLife(*one, self._freed_at.get(number, end)) for number, one in enumerate(self._born)]

    def watch(self, tensor: Tensor) -> None:
        """See :meth:`runner.model.live_tracker.LiveTracker.watch`."""
        before = self.live
        super().watch(tensor)
        if self.live > before:
            self._moment += 1
            weakref.finalize(tensor.untyped_storage(), self._note_freed, len(self._born))
            self._born.append((self.live - before, self._moment))

    def _note_freed(self, number: int) -> None:
        self._moment += 1
        self._freed_at[number] = self._moment


class ArenaRow(NamedTuple):
    """The arena of a model's program; ``peak_bytes`` are the most that a tracker has counted."""

    program: str
    peak_bytes: int
    figures: ArenaFigures


def arena_rows(task: Task, *, share: float, link: float) -> Iterator[ArenaRow]:
    """Yield the row of the run that keeps everything, and that of what autoswap chooses.

    Args:
        task: the model.
        share: the budget, as a part of the peak of the run that keeps everything.
        link: speed of the link in bytes per second.
    """
    bench = Bench(task, 0)
    autoswap = OFFLOADS["autoswap"].over(STRATEGIES["none"])
    chosen = bench.solved(autoswap, round(share * bench.plain.peak_bytes), link)[1]
    for name, program in (("keeps everything", bench.whole), ("`autoswap`", chosen)):
        _, _, step = bench.prepared(program, link)
        with LifetimeTracker() as tracker:
            step()
        yield ArenaRow(name, tracker.peak, ArenaFigures.of(tracker.lives))


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, and print the table or write it."""
    parser = argparse.ArgumentParser(prog="python -m runner.recipes.offloading.arenas")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--share", type=float, default=0.4, help="the budget, as a part of the plain peak")
    parser.add_argument("--link", type=float, default=_LINK, help="bytes per second")
    parser.add_argument("--write-readme", action="store_true", help="put the table into the recipe's README")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for name in asked.models:
        print(f"{name} ...", flush=True)
        rows += [_cells(name, row) for row in arena_rows(MODELS[name](), share=asked.share, link=asked.link)]
    table = markdown_table(_HEADER, rows)
    if asked.write_readme:
        replace_block(Path(__file__).parent / "README.md", "arenas", table)
    else:
        print(table)
    return 0


def _cells(model: str, row: ArenaRow) -> list[str]:
    found = row.figures
    sizes = found.bound_bytes, found.best_fit_bytes, found.arena_bytes
    ratios = found.best_fit_bytes / found.bound_bytes, found.arena_bytes / found.bound_bytes
    return [model, row.program, f"{found.tensors:,}", *(f"{size:,}" for size in sizes), *(f"{x:.3f}" for x in ratios)]


if __name__ == "__main__":
    raise SystemExit(main())
