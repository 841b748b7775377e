"""The published table's memory as DeepSpeed 0.5.9 (3 January 2022), not 0.19.8, would reserve it: a prediction.

``python -m runner.recipes.benchmarks.table5_2022`` prints both beside the paper, which appeared in February 2022.

What 0.5.9 does otherwise, by its own files: without ZeRO it has no buffer of gradients, which are autograd's and
live until the update (engine.py: zero_grad). Stage 1 collects nothing while the backward runs (engine.py:
_configure_zero_optimizer turns contiguous_gradients off), and sums flat copies afterwards, cast to 16 bits
(stage_1_and_2.py: allreduce_bucket). Stage 2 sums its bucket in place, without a flat copy (average_tensor). Stage 3
has two buckets while the backward runs, because overlap_comm is on by default there (stage3.py: backward).
Sizes of buckets, gathered and prefetched weights are those of 0.19.8.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from runner.config.compose.resolve import resolve
from runner.profiling.model import example_microbatch
from runner.recipes.benchmarks.memory_trace import MemoryTrace, trace_of
from runner.recipes.benchmarks.reserved import Replicated, SharedStates, SharedWeights, predict_reserved
from runner.recipes.rudalle.table5 import NAMES, PUBLISHED, Key
from runner.recipes.rudalle.table5_full import errors, skill

__all__ = ["STAGES_2022", "predicted"]

_HALF = 2  # bytes of an element in the format in which stage 1 sums


class _Replicated(Replicated):
    """Stage 0: gradients are those of the trace, which releases them after the update."""

    def prepare(self) -> None:
        for elements in self.trace.parameters:
            self.hold(elements * self.width)

    def gradient(self, name: Hashable, parameter: int) -> None:
        """The gradient stays where autograd made it."""


class _SharedStates(SharedStates):
    """Stages 1 and 2."""

    def backward_begins(self) -> None:
        if self.stage != 1:
            super().backward_begins()
        self._filled, self._own = 0, None

    def backward_ends(self) -> None:
        if self.stage != 1:
            super().backward_ends()
            return
        for elements in self._buckets():
            flat = self.hold(elements * self.width)
            self.pass_by(elements * _HALF)
            self.memory.release(flat)
        for name in self._waiting.values():
            self.memory.release(name)
        self._waiting.clear()
        if not self.offloaded:
            self._own = self.hold(self.part * self.width)

    def _buckets(self) -> Iterator[int]:
        """The elements of each flat copy, in which whole gradients are laid out one after the other."""
        filled = 0
        for parameter in sorted(self._waiting):
            elements = self.trace.parameters[parameter]
            if filled and filled + elements > self.bucket:
                yield filled
                filled = 0
            filled += elements
        yield filled

    def _reduce(self) -> None:
        if self._filled and self._own is None and not self.offloaded:
            self._own = self.hold(self.part * self.width)
        self._filled = 0


class _SharedWeights(SharedWeights):
    """Stage 3."""

    def hold_bucket(self) -> None:
        """Allocate nothing: the buckets live while the backward runs."""

    def backward_begins(self) -> None:
        self._both = [self.hold(self.bucket * self.width) for _ in range(2)]

    def backward_ends(self) -> None:
        super().backward_ends()
        for bucket in self._both:
            self.memory.release(bucket)


STAGES_2022 = (_Replicated, _SharedStates, _SharedStates, _SharedWeights)
"""What a rank allocates under each stage of ZeRO, 0 to 3, in 0.5.9."""


def predicted(trace: MemoryTrace) -> dict[Key, tuple[int, int]]:
    """Reserved bytes of each published cell: by DeepSpeed 0.19.8, and by 0.5.9.

    Args:
        trace: of the published model and its micro-batch.
    """
    return {key: _cell(key, trace) for key in PUBLISHED}


def _cell(key: Key, trace: MemoryTrace) -> tuple[int, int]:
    optimizer, stage = key
    config = resolve(["recipe=rudalle_table5_full", f"optimizer={optimizer}", f"zero.stage={stage}"])
    found = [predict_reserved(config, trace, stages=rules) for rules in (None, STAGES_2022)]
    return found[0] or 0, found[1] or 0


def _print() -> None:
    config = resolve(["recipe=rudalle_table5_full", "zero.stage=0"])
    both = predicted(trace_of(config, *example_microbatch(config)))
    print("optimizer, ZeRO: GB by 0.19.8, by 0.5.9, paper")
    for (optimizer, stage), (now, then) in both.items():
        print(f"{NAMES[optimizer]}, {stage}: {now / 1e9:.1f}, {then / 1e9:.1f}, {PUBLISHED[optimizer, stage][0]:.1f}")
    for name, column in (("0.19.8", 0), ("0.5.9", 1)):
        cells = {key: float(values[column]) for key, values in both.items()}
        worst = max(map(abs, errors(cells, 0, 1e9).values()))
        print(f"{name}: worst error {worst:.1%}, skill over the paper's mean {skill(cells, 0, 1e9):.2f}")


if __name__ == "__main__":
    _print()
