"""Optimizers that see the layers: what each forward and backward shows of them, besides the weights' gradients.

An optimizer's kind says how to make its :class:`LayerWatch` (:attr:`runner.optim.catalogue.kind.OptimizerKind.watch`);
everything else asks :func:`watch_of`, and knows no optimizer by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from runner.engine.works.work import Filler
from runner.model.layers import StageModule
from runner.model.ties import Tie
from runner.optim.catalogue.registry import kind_of_class

__all__ = ["LayerWatch", "watch_of"]


class LayerWatch(Protocol):
    """What one optimizer does with what it sees of the layers.

    ``ties`` are those of the whole model: a weight with several names is seen alike, whatever the cut.
    """

    @property
    def held(self) -> Sequence[Tensor]:
        """What the optimizer holds besides its states."""
        ...

    def watch(self, stages: Mapping[int, StageModule], ties: Sequence[Tie]) -> None:
        """See the stages' layers from now on; all work is done in the backwards and in the optimizer's step."""
        ...

    def begin(self) -> None:
        """Of layers that are watched: the first forward of a step comes."""
        ...

    def filler(
        self,
        stages: Mapping[int, StageModule],
        ties: Sequence[Tie],
        partition: Sequence[tuple[int, int]] | None = None,
    ) -> Filler:
        """See the stages' layers from now on, and leave the work to a schedule's actions.

        Args:
            stages: by number.
            ties: of the whole model.
            partition: of ``stages`` with one module that holds all layers: first and last layer of each stage that
                actions name; None: these are the modules' own.
        """
        ...

    def rehearse(self, module: StageModule, copies: Mapping[int, nn.Parameter]) -> None:
        """Let the steps of an optimizer over copies of a stage's parameters take as long as those of a run.

        Args:
            module: the stage.
            copies: by the ``id`` of the parameter that each is a copy of.
        """
        ...

    def seconds_besides(self, measure: Callable[[Callable[[], None]], float]) -> float:
        """Of an optimizer that was rehearsed: seconds of a mean step besides its update, if no schedule has this work.

        Args:
            measure: seconds of one call.
        """
        ...


def watch_of(optimizer: Optimizer) -> LayerWatch | None:
    """What ``optimizer`` does with what it sees of the layers; None if it sees nothing of them."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
    kind = kind_of_class(type(optimizer))
    return None if kind is None or kind.watch is None else kind.watch(optimizer)
