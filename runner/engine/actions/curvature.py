"""K-FAC's work as actions of a schedule: what micro-batches show of the layers waits until its turn has come."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from runner.engine.measure.timeline import Timeline
from runner.engine.works.work import NOTHING, Place
from runner.optim.kinds.kfac import KFAC, Factor, Factors, trained_bias
from runner.schedule.values import CURVATURE, Action, Op

__all__ = ["ScheduledCurvature"]

_Kept = tuple[Factor, Tensor]


class ScheduledCurvature:
    """The factors of one rank's stages: a :class:`runner.engine.works.work.Filler`.

    Inputs and output gradients of the micro-batches of an interval's first step are kept, not copied, until a CURV
    action adds them to their factor. Their order is that in which they were seen, whenever it is done.

    Args:
        kfac: updates the weights with the inverses that it is asked for here.
        layers: those of each stage that it preconditions.
    """

    def __init__(self, kfac: KFAC, layers: Mapping[int, Iterable[nn.Linear]]) -> None:
        kfac.follow_schedule()
        self._kfac = kfac
        self._factors: dict[int, list[Factors]] = {stage: [] for stage in layers}
        self._kept: dict[tuple[Op, int, int], list[_Kept]] = {}
        self._is_first = False  # of the steps of an interval
        self._seen: tuple[int, int] | None = None  # stage and micro-batch of the forward that runs
        for stage, found in layers.items():
            for layer in found:
                factors = kfac.track(layer.weight, trained_bias(layer))
                self._factors[stage].append(factors)
                layer.register_forward_hook(partial(self._see, factors), with_kwargs=True)

    @property
    def kept(self) -> list[Tensor]:
        """What waits to be summed."""
        return [value for parts in self._kept.values() for _, value in parts]

    def begin(self, window: int) -> None:
        """A step comes, by its number in the interval. The first forgets what was summed for one that did not end."""
        self._is_first = window == 0
        if self._is_first:
            self._kept.clear()
            for factors in self._factors.values():
                for each in factors:
                    each.clear()

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        """A forward shows the layers' inputs; its backward, any time later, the gradients of their outputs."""
        return self.seeing(place.stage, place.microbatch) if keeps else NOTHING

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        """Nothing: hooks that the forward has set see the backward."""
        return NOTHING

    @contextmanager
    def seeing(self, stage: int, microbatch: int) -> Iterator[None]:
        """Within it, a stage's forward runs; its backward may run any time later."""
        self._seen = (stage, microbatch) if self._is_first else None
        try:
            yield
        finally:
            self._seen = None

    ops = CURVATURE

    def do(self, action: Action, timeline: Timeline) -> None:
        """Sum what an action names, or invert what was summed."""
        start = time.perf_counter()
        if action.microbatch is not None:
            self._sum((action.op, action.stage, action.microbatch))
        else:
            for factors in self._factors[action.stage]:
                self._kfac.invert(factors.inputs if action.op is Op.INV_A else factors.outputs)
        timeline.compute(action.op, action.stage, action.microbatch, start, time.perf_counter())

    def settle(self) -> None:
        """Sum what is still kept, and put all sums to the states, with which they are saved.

        The actions that would have done it find nothing to do; the inverses are the same, and as old.
        """
        for key in list(self._kept):
            self._sum(key)
        self._kfac.keep_sums()

    def _sum(self, key: tuple[Op, int, int]) -> None:
        for factor, values in self._kept.pop(key, ()):
            factor.add(values)

    def _see(
        self, factors: Factors, layer: nn.Linear, given: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
    ) -> None:
        if self._seen is not None and output.requires_grad:
            value = given[0] if given else named["input"]
            self._keep((Op.CURV_A, *self._seen), factors.inputs, value)
            output.register_hook(partial(self._keep, (Op.CURV_B, *self._seen), factors.outputs))  # type: ignore[no-untyped-call]

    def _keep(self, key: tuple[Op, int, int], factor: Factor, value: Tensor) -> None:
        self._kept.setdefault(key, []).append((factor, value.detach()))
