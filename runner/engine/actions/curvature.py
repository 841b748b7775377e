"""K-FAC in the engine: which layers it watches, and its work as actions of a schedule.

The inputs and gradients that it takes from micro-batches are kept until their action in the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from runner.engine.measure.timeline import Timeline
from runner.engine.work import NOTHING, Place
from runner.model.layers import StageModule
from runner.model.ties import Tie
from runner.optim.kinds.kfac import KFAC, Factor, Factors, preconditioned_layers, trained_bias
from runner.schedule.generators.one_directional.pipefisher import CURV_A, CURV_B, INV_A
from runner.schedule.values import Action

__all__ = ["CurvatureWatch", "ScheduledCurvature"]

_Kept = tuple[Factor, Tensor]


class CurvatureWatch:
    """Lets K-FAC watch the layers that it preconditions: a :class:`runner.engine.works.watch.LayerWatch`."""

    def __init__(self, kfac: KFAC) -> None:
        self._kfac = kfac

    @property
    def held(self) -> Sequence[Tensor]:
        """The factors of all layers."""
        return self._kfac.factors

    def watch(self, stages: Mapping[int, StageModule], ties: Sequence[Tie]) -> None:
        """Watch the layers of all stages; backwards sum the factors, and the optimizer step inverts them."""
        self._kfac.watch(chain.from_iterable(_layers_of(stages, ties).values()))

    def begin(self) -> None:
        """Drop the sums of a step that did not end."""
        self._kfac.begin()

    def filler(
        self,
        stages: Mapping[int, StageModule],
        ties: Sequence[Tie],
        partition: Sequence[tuple[int, int]] | None = None,
    ) -> ScheduledCurvature:
        """Watch the layers; the schedule decides when factors are summed and inverted.

        Args:
            stages: this rank's stages.
            ties: the model's tied weights, whose layers are not preconditioned.
            partition: the first and last layer of each stage of a schedule whose stages are all in the one stage of
                ``stages``; None if ``stages`` are the schedule's own.
        """
        layers = _layers_of(stages, ties)
        if partition is not None:
            (whole,), (found,) = stages.values(), layers.values()
            cuts = [whole.layers_between(first, last) for first, last in partition]
            held = [{id(module) for part in cut for module in part.modules()} for cut in cuts]
            layers = {stage: [each for each in found if id(each) in own] for stage, own in enumerate(held)}
        return ScheduledCurvature(self._kfac, layers)

    def rehearse(self, module: StageModule, copies: Mapping[int, nn.Parameter]) -> None:
        """Compute inverses for the layers of ``module``, so that steps of the rehearsal precondition."""
        for layer in preconditioned_layers(module):
            self._kfac.track(copies[id(layer.weight)], copies.get(id(layer.bias)))
        self._invert_all()

    def seconds_besides(self, measure: Callable[[Callable[[], None]], float]) -> float:
        """The seconds of all inversions, divided by the number of steps that use their results."""
        every = self._kfac.refresh_every
        return measure(self._invert_all) / every if every else 0.0

    def _invert_all(self) -> None:
        """Invert all factors, whose sums may be zero."""
        for factor in chain.from_iterable(self._kfac.tracked):
            factor.rows = 1
        self._kfac.refresh()


def _layers_of(stages: Mapping[int, StageModule], ties: Sequence[Tie]) -> dict[int, list[nn.Linear]]:
    """The layers of each stage that are preconditioned; a layer with a tied weight never is."""
    tied_names = {tie.name for tie in ties}
    found = {}
    for number, stage in stages.items():
        named = stage.named_parameters(remove_duplicate=False)
        tied = [parameter for name, parameter in named if stage.global_name(name) in tied_names]
        found[number] = list(preconditioned_layers(stage, tied))
    return found


class ScheduledCurvature:
    """Sums and inverts the factors of one rank's stages: a :class:`runner.engine.work.Filler`.

    In the first step of an interval, the layers' inputs and output gradients are kept without a copy until a CURV
    action adds them to their factor. They are added in the order in which they were seen, whenever the action runs.

    Args:
        kfac: the optimizer, which updates the weights with the inverses that are computed here.
        layers: the layers of each stage that it preconditions.
    """

    def __init__(self, kfac: KFAC, layers: Mapping[int, Iterable[nn.Linear]]) -> None:
        kfac.follow_schedule()
        self._kfac = kfac
        self._factors: dict[int, list[Factors]] = {stage: [] for stage in layers}
        self._kept: dict[tuple[str, int, int], list[_Kept]] = {}
        self._is_first = False  # whether the current step is the first one of an interval
        self._seen: tuple[int, int] | None = None  # stage and micro-batch of the current forward
        for stage, found in layers.items():
            for layer in found:
                factors = kfac.track(layer.weight, trained_bias(layer))
                self._factors[stage].append(factors)
                layer.register_forward_hook(partial(self._see, factors), with_kwargs=True)

    @property
    def kept(self) -> list[Tensor]:
        """The tensors that are kept until they are summed."""
        return [value for parts in self._kept.values() for _, value in parts]

    def begin(self, window: int) -> None:
        """Begin a step; ``window`` is its number in the interval. The first one drops the sums of an unfinished one."""
        self._is_first = window == 0
        if self._is_first:
            self._kept.clear()
            for factors in self._factors.values():
                for each in factors:
                    each.clear()

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        """Return the context of a forward, which keeps the layers' inputs and, later, their outputs' gradients."""
        return self.seeing(place.stage, place.microbatch) if keeps else NOTHING

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        """Return a context that does nothing, because hooks from the forward watch the backward."""
        return NOTHING

    @contextmanager
    def seeing(self, stage: int, microbatch: int) -> Iterator[None]:
        """The context in which a stage's forward runs; its backward may run at any time later."""
        self._seen = (stage, microbatch) if self._is_first else None
        try:
            yield
        finally:
            self._seen = None

    def do(self, action: Action, timeline: Timeline) -> None:
        """Do an action: sum the tensors of its micro-batch, or invert the factors of its stage."""
        start = timeline.moment()
        if action.microbatch is not None:
            self._sum((action.work, action.stage, action.microbatch))
        else:
            for factors in self._factors[action.stage]:
                self._kfac.invert(factors.inputs if action.fill == INV_A.name else factors.outputs)
        timeline.compute(action.work, action.stage, action.microbatch, start)

    def settle(self) -> None:
        """Sum all tensors that are still kept, and put the sums into the optimizer's states, so that they are saved.

        The actions for these tensors then have nothing left to do. The inverses are the same as without this call, and
        are computed at the same steps.
        """
        for key in list(self._kept):
            self._sum(key)
        self._kfac.keep_sums()

    def _sum(self, key: tuple[str, int, int]) -> None:
        for factor, values in self._kept.pop(key, ()):
            factor.add(values)

    def _see(
        self, factors: Factors, layer: nn.Linear, given: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
    ) -> None:
        if self._seen is not None and output.requires_grad:
            value = given[0] if given else named["input"]
            self._keep((CURV_A.name, *self._seen), factors.inputs, value)
            output.register_hook(partial(self._keep, (CURV_B.name, *self._seen), factors.outputs))  # type: ignore[no-untyped-call]

    def _keep(self, key: tuple[str, int, int], factor: Factor, value: Tensor) -> None:
        self._kept.setdefault(key, []).append((factor, value.detach()))
