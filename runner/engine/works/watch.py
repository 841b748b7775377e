"""Optimizers that watch layers: they use more of forwards and backwards than the gradients of the weights.

An optimizer's kind says how to make its :class:`LayerWatch` (:attr:`runner.optim.catalogue.kind.OptimizerKind.watch`);
all other code calls :func:`watch_of`, and knows no optimizer by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from runner.engine.work import Filler
from runner.model.layers import StageModule
from runner.model.ties import Tie
from runner.optim.catalogue.registry import kind_of_class

__all__ = ["LayerWatch", "watch_of"]


class LayerWatch(Protocol):
    """The work of one optimizer with what it sees in the layers.

    ``ties`` are those of the whole model, so that a weight with several names is treated alike in every partition.
    """

    @property
    def held(self) -> Sequence[Tensor]:
        """The tensors that the optimizer holds in addition to its states."""
        ...

    def watch(self, stages: Mapping[int, StageModule], ties: Sequence[Tie]) -> None:
        """Watch the stages' layers from now on; all work is done in the backwards and in the optimizer's step."""
        ...

    def begin(self) -> None:
        """Begin a step of watched layers, before its first forward."""
        ...

    def filler(
        self,
        stages: Mapping[int, StageModule],
        ties: Sequence[Tie],
        partition: Sequence[tuple[int, int]] | None = None,
    ) -> Filler:
        """Watch the stages' layers from now on, and return the filler that does the work in a schedule's actions.

        Args:
            stages: the stage modules by number.
            ties: the ties of the whole model.
            partition: first and last layer of each stage that actions name, if ``stages`` is one module with all
                layers; None: the stages of actions are those of the modules.
        """
        ...

    def rehearse(self, module: StageModule, copies: Mapping[int, nn.Parameter]) -> None:
        """Prepare an optimizer over copies of a stage's parameters, so that its steps take as long as those of a run.

        Args:
            module: the stage.
            copies: the copy of each parameter, by the ``id`` of the parameter.
        """
        ...

    def seconds_besides(self, measure: Callable[[Callable[[], None]], float]) -> float:
        """Mean seconds of a step besides its update, if no schedule has this work; call :meth:`rehearse` before.

        Args:
            measure: returns the seconds of one call.
        """
        ...


def watch_of(optimizer: Optimizer) -> LayerWatch | None:
    """The watch of ``optimizer``; None if it does not watch layers."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
    kind = kind_of_class(type(optimizer))
    return None if kind is None or kind.watch is None else kind.watch(optimizer)
