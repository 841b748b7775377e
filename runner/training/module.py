"""A LightningModule for the user's layers, loss and optimizer that hands its batches to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.config.schema import RunConfig
from runner.engine.window import StepBatch
from runner.model.data import LossFunction
from runner.model.layers import LayerSource, StageModule, build_stage
from runner.model.ties import find_ties
from runner.optim.build import optimizer_of_run
from runner.optim.learning_rate import build_scheduler
from runner.strategy.migration import emptied, kept_sources, layers_in, tensors_of
from runner.strategy.pipeline import EngineStrategy
from runner.training.validation import LOSS, ValidationSums, note_means

if TYPE_CHECKING:
    from runner.model.sharded.plan import Division

__all__ = ["LayersModule", "requested_optimizer"]


def requested_optimizer(config: RunConfig, stages: nn.ModuleDict) -> OptimizerLRSchedulerConfig:
    """The optimizer that the request names, for the stages of a rank, with its learning rate per step."""
    trained = [parameter for parameter in stages.parameters() if parameter.requires_grad]
    # DeepSpeed makes and shards its own master weights
    optimizer = optimizer_of_run(config, trained, masters=not config.zero.stage)
    scheduler = build_scheduler(config, optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LayersModule(pl.LightningModule):
    """Implements :class:`runner.strategy.pipeline.PipelineModule`.

    Args:
        sources: the layers of the whole model; this rank builds its own.
        loss_function: see ``loss.target``.
        config: for optimizer, learning rate and the number of steps.
        division: how weights are divided among ranks; None: they are whole.
    """

    def __init__(
        self,
        sources: Sequence[LayerSource],
        loss_function: LossFunction,
        config: RunConfig,
        division: Division | None = None,
    ) -> None:
        super().__init__()
        self.division = division
        self.loss_function = loss_function
        self.stages = nn.ModuleDict()
        self.val_losses: list[list[float]] = []
        self.val_metrics: dict[str, list[list[float]]] = {}
        self.ties = find_ties(sources)
        self._sources = sources
        self._config = config
        self._validation = ValidationSums()

    @property
    def engine_strategy(self) -> EngineStrategy:
        strategy = self.trainer.strategy
        assert isinstance(strategy, EngineStrategy)
        return strategy

    def build_stages(self, partition: Sequence[tuple[int, int]], stages: Sequence[int]) -> Mapping[int, StageModule]:
        built = {stage: build_stage(self._sources, *partition[stage]) for stage in stages}
        self.stages = nn.ModuleDict({str(stage): module for stage, module in built.items()})
        if self._config.partition.migrate is None:
            self._sources = ()  # releases layers that belong to other ranks
        else:
            self._keep(layers_in(built.values()))
        return built

    def _keep(self, held: Mapping[int, nn.Module]) -> None:
        """Keep the layers of other ranks for when they come, without memory, and those of this rank as they are."""
        own = [tensor for layer in held.values() for tensor in tensors_of(layer)]
        for source in self._sources:
            if source.given is not None and source.index not in held:
                emptied(source.given, own)
        self._sources = kept_sources(self._sources, held)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return requested_optimizer(self._config, self.stages)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Do nothing: the engine owns the gradients."""

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        return self.engine_strategy.hand_over(batch)

    def validation_step(self, batch: StepBatch, batch_idx: int) -> None:
        strategy = self.engine_strategy
        self._validation.add_all(strategy.options.metrics, strategy.validate(batch))

    test_step = validation_step

    def predict_step(self, batch: StepBatch, batch_idx: int) -> Any:
        """The last layer's output, on the ranks of the last stage; None on the others."""
        return self.engine_strategy.predict(batch)

    def on_validation_epoch_end(self) -> None:
        note_means(self, self.trainer.global_step, self._log_means("val"))

    def on_test_epoch_end(self) -> None:
        self._log_means("test")

    def _log_means(self, prefix: str) -> dict[str, float]:
        """Log and return the mean loss and metrics over all samples of the set, over all replicas."""
        means = self._validation.means(self.engine_strategy, self.engine_strategy.options.metrics)
        for name, value in means.items():
            self.log(f"{prefix}_{name}", value, prog_bar=name == LOSS, batch_size=1)
        return means

    def check_metrics(self, batch: StepBatch) -> None:
        """Measure the metrics of a batch, and forget them: a wrong function is refused before the first step.

        Raises:
            RequestError: see :meth:`runner.engine.engine.Engine.validate`.
        """
        self.engine_strategy.validate(batch)
