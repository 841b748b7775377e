"""The offload strategy that ranks layers by scores of what they save, and moves as many as memory_limit asks for.

The scores of AutoSwap (Zhang et al. 2019), from the time in which a layer's tensors are not used:

- DOA, the duration of absence: this time without that of the two copies;
- AOA, the area of absence: the duration times the bytes;
- WDOA, the weighted duration: the bytes that are alive, summed over this time;
- SWDOA, the submodular one: the same, counted again without what has been moved after each layer.

The layers are ranked by weighted sums of the four, each divided by its largest value. AutoSwap finds the weights by
Bayesian optimization of one program; here every weighted sum of a fixed list gives programs of all lengths, and the
choice under the budget takes the best one.

Its other half is an allocator, SmartPool, that knows the lifetimes of all tensors:
:mod:`runner.memory.solve.static_arena` plans it, and the plan tells its size.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runner.memory.solve.offload import Offload, move_all, prefixes
from runner.memory.solve.residency import WeightUnit
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, StageChain
from runner.memory.solve.weight_sets import first_of_orders
from runner.memory.solve.weight_strategy import StageUnits

__all__ = ["OFFLOAD", "Scores"]

_DRAWS = 8  # random weighted sums, besides the four scores alone


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a chain; lists are by layer.

    Args:
        saved: bytes that each layer keeps.
        forward, backward: seconds of each layer.
        copying: seconds of the copy of what each layer keeps, in one direction.
    """

    saved: Sequence[float]
    forward: Sequence[float]
    backward: Sequence[float]
    copying: Sequence[float]

    def durations(self) -> list[float]:
        """DOA of each layer."""
        seconds = self._seconds
        return [sum(seconds[k] for k in self._absent(at)) - 2 * copy for at, copy in enumerate(self.copying)]

    def areas(self) -> list[float]:
        """AOA of each layer."""
        return [duration * num_bytes for duration, num_bytes in zip(self.durations(), self.saved, strict=True)]

    def weighted(self, gone: Sequence[int] = ()) -> list[float]:
        """WDOA of each layer, if the layers in ``gone`` have been moved."""
        load = self._load
        for at in gone:
            for k in self._absent(at):
                load[k] -= self.saved[at]
        return [sum(load[k] * self._seconds[k] for k in self._absent(at)) for at in range(len(self.saved))]

    def submodular(self) -> list[float]:
        """SWDOA of each layer: the score that it has when it is the next best one."""
        found, gone = [0.0] * len(self.saved), list[int]()
        while len(gone) < len(self.saved):
            scores = self.weighted(gone)
            best = max((at for at in range(len(scores)) if at not in gone), key=lambda at: scores[at])
            found[best] = scores[best]
            gone.append(best)
        return found

    @property
    def _seconds(self) -> list[float]:
        """The seconds of all forwards, and of all backwards in their order."""
        return [*self.forward, *reversed(self.backward)]

    @property
    def _load(self) -> list[float]:
        """The bytes that are alive in each forward and each backward."""
        alive, sums = 0.0, []
        for num_bytes in self.saved:
            alive += num_bytes
            sums.append(alive)
        return [*sums, *reversed(sums)]

    def _absent(self, at: int) -> range:
        """The forwards and backwards in which nothing of a layer is used, as indices of :attr:`_seconds`."""
        return range(at + 1, 2 * len(self.saved) - 1 - at)


def _candidates(chain: StageChain, program: ChainProgram) -> Iterator[Candidate]:
    layers = chain.layers
    saved = [float(layer.saved_bytes) for layer in layers]
    scores = Scores(
        saved,
        [layer.forward_seconds for layer in layers],
        [layer.backward_seconds for layer in layers],
        [chain.copy_seconds(num_bytes) for num_bytes in saved],
    )
    orders = ([chain.first + at for at in order] for order in _orders(scores))
    offered = (prefixes("autoswap", program, order) for order in orders)
    yield from {each.program: each for candidates in offered for each in candidates}.values()


def _weights_by_scores(stage: StageUnits) -> list[WeightUnit]:
    """The weights that are ranked first, as few as the limit asks for; between forwards and backwards none is used."""
    sizes = [float(unit.device_bytes) for unit in stage.units]
    orders = _orders(Scores(sizes, stage.forward, stage.backward, stage.copying))
    return first_of_orders(stage.units, stage.excess_bytes or 0, orders)


def _orders(scores: Scores) -> list[tuple[int, ...]]:
    """What has these scores, by number, in the orders of all weighted sums."""
    kinds = [_shares(each) for each in (scores.durations(), scores.areas(), scores.weighted(), scores.submodular())]
    return list(dict.fromkeys(tuple(_ranked(kinds, weights)) for weights in _weights()))


def _ranked(kinds: Sequence[Sequence[float]], weights: Sequence[float]) -> list[int]:
    """The layers, counted from the stage's first, from the highest weighted score to the lowest."""
    scores = [sum(weight * score for weight, score in zip(weights, of, strict=True)) for of in zip(*kinds, strict=True)]
    return sorted(range(len(scores)), key=lambda at: -scores[at])


def _shares(scores: Sequence[float]) -> list[float]:
    """Scores as parts of the largest one."""
    largest = max(map(abs, scores), default=0.0) or 1.0
    return [score / largest for score in scores]


def _weights() -> Iterator[tuple[float, ...]]:
    """Weights of the four scores: each alone, and random ones, which are always the same."""
    for alone in range(4):
        yield tuple(float(at == alone) for at in range(4))
    chance = random.Random(0)
    for _ in range(_DRAWS):
        yield tuple(chance.random() for _ in range(4))


OFFLOAD = Offload(
    "autoswap",
    move_all,
    source="Zhang et al. 2019, Efficient Memory Management for GPU-based Deep Learning Systems (AutoSwap)",
    about="the layers that are ranked first by weighted scores of their absence, as few as fit into memory_limit",
    candidates=_candidates,
    plans_arena=True,
    choose_weights=_weights_by_scores,
)
