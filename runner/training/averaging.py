"""An exponential moving average of the weights; each rank averages its own stages without any communication.

Lightning's WeightAveraging copies the whole module before the stages exist; this callback follows the engine's stages.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Parameter

from runner.engine.engine import Engine
from runner.model.tags import named_parameters
from runner.strategy.pipeline import EngineStrategy
from runner.strategy.whole_tensors import cut

__all__ = ["AVERAGE", "WeightAveraging"]

AVERAGE = "averaged_weights"
"""Key of the averages in a checkpoint, by global parameter name."""


class WeightAveraging(Callback):
    """Keeps ``average = decay * average + (1 - decay) * weights`` in fp32 after every step.

    The average starts with the initial weights. Validation within a fit uses the averages; the trained weights are put
    back afterwards. Buffers and frozen parameters are not averaged. A skipped step counts as a step that changed
    nothing.

    Args:
        decay: factor of the average at each step, in (0, 1).
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie in (0, 1), got {decay}")
        self._decay = decay
        self._weights: dict[str, Parameter] = {}
        self._averages: dict[str, Tensor] = {}
        self._loaded: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = _strategy(trainer)
        assert strategy.engine is not None
        self._weights = _trained(strategy.engine)
        strategy.averages = self._averages
        loaded = cut({name: self._loaded[name] for name in self._weights if name in self._loaded}, strategy.engine)
        for name, parameter in self._weights.items():
            start = loaded.get(name, parameter.detach())
            self._averages[name] = _wide(start).to(device=parameter.device, copy=True)
        if strategy.meter is not None:
            strategy.meter.hold(sum(value.numel() * value.element_size() for value in self._averages.values()))

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        engine = _strategy(trainer).engine
        if engine is not None and self._weights.keys() != self._averages.keys():
            self._weights = _trained(engine)  # layers have moved, and their averages with them
        for name, parameter in self._weights.items():
            self._averages[name].lerp_(_wide(parameter.detach()), 1.0 - self._decay)

    @torch.no_grad()
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        for name, average in self._averages.items():
            parameter = self._weights[name]
            self._kept[name] = parameter.detach().clone()
            parameter.copy_(average)

    @torch.no_grad()
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, weight in self._kept.items():
            self._weights[name].copy_(weight)
        self._kept.clear()

    def whole(self, strategy: EngineStrategy) -> dict[str, Tensor]:
        """The whole model's averages by global name on rank 0, empty on other ranks. Every rank must call it.

        For a checkpoint in parts, it returns the averages of this rank only.
        """
        assert strategy.engine is not None
        saved = strategy.engine.saved_parameters
        averages = {name: value for name, value in self._averages.items() if name in saved}
        own = {name: value.cpu() for name, value in strategy.saved_here(averages).items()}
        return {name: value for part in strategy.saved_parts(own) or [] for name, value in part.items()}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[AVERAGE] = self.whole(_strategy(trainer))

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded = dict(checkpoint.get(AVERAGE, {}))


def _trained(engine: Engine) -> dict[str, Parameter]:
    own = named_parameters(engine.stages)
    return {name: parameter for name, parameter in own.items() if engine.tags[name].is_trained}


def _wide(value: Tensor) -> Tensor:
    """A weight in the format of its average: fp32, or its own if it is complex."""
    return value if value.is_complex() else value.float()


def _strategy(trainer: pl.Trainer) -> EngineStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, EngineStrategy):
        raise TypeError(f"WeightAveraging follows a PipelineStrategy's stages, not a {type(strategy).__name__}'s")
    return strategy
