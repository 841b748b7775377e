"""Lets a user's LightningModule run in a pipeline: its steps hand their batches to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from runner.engine.window import StepBatch
from runner.model.boundary import num_samples
from runner.model.metrics import of_metrics
from runner.training.data.batches import batch_checksum

if TYPE_CHECKING:
    from runner.strategy.pipeline import EngineStrategy

__all__ = ["ModuleSteps", "leave_gradients"]

_VALIDATION_LOSS = "val_loss"

_CHECK_EVERY = 100  # batches between two comparisons of all samples of a batch over the ranks of a pipeline


def leave_gradients(epoch: int, batch_idx: int, optimizer: Any) -> None:
    """Do nothing: gradients belong to the engine or, with ZeRO, to the optimizer, which has offload buffers."""


class ModuleSteps:
    """``training_step``, ``validation_step``, ``test_step`` and ``predict_step`` of one module in one pipeline.

    Batches are ``(input, target)``. ``val_loss`` and ``test_loss`` are means over the samples of all replicas and are
    logged on every rank. A prediction is the last layer's output for the batch on ranks of the last stage, None
    elsewhere.
    """

    def __init__(self, strategy: EngineStrategy, model: pl.LightningModule) -> None:
        self._strategy = strategy
        self._model = model
        self._sums: list[list[tuple[float, float]]] = []

    def bind(self) -> None:
        """Replace the module's own steps. Its other hooks are kept and run as usual."""
        own = {
            "training_step": self.training_step,
            "validation_step": self.evaluation_step,
            "test_step": self.evaluation_step,
            "predict_step": self.predict_step,
            "optimizer_zero_grad": leave_gradients,
            "on_validation_epoch_end": self._ending(_VALIDATION_LOSS, self._model.on_validation_epoch_end),
            "on_test_epoch_end": self._ending("test_loss", self._model.on_test_epoch_end),
        }
        self._model.__dict__.update(own)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._strategy.hand_over(self._part(batch, batch_idx))

    def evaluation_step(self, batch: Any, batch_idx: int) -> None:
        self._sums.append(self._strategy.validate(self._part(batch, batch_idx)))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
        return self._strategy.predict(self._part((inputs, None), batch_idx))

    def _part(self, batch: Any, number: int) -> StepBatch:
        """The part of a batch that this rank's stages need; every rank has loaded the whole batch.

        Args:
            batch: ``(input, target)``.
            number: its number in the epoch.
        """
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(f"a batch must be (input, target), not a {type(batch).__name__}")
        inputs, targets = batch
        stages, last = self._strategy.stages, self._strategy.plan.schedule.stages - 1
        return StepBatch(
            inputs=inputs if 0 in stages else None,
            targets=targets if last in stages else None,
            samples=num_samples(inputs),
            checksum=batch_checksum(inputs, targets, whole=number % _CHECK_EVERY == 0),
        )

    def _ending(self, name: str, own: Callable[[], None]) -> Callable[[], None]:
        def on_epoch_end() -> None:
            sums, self._sums = self._sums, []
            metrics = self._strategy.options.metrics
            rows = 1 + sum(metric.num_rows for metric in metrics)
            total = torch.tensor(sums, dtype=torch.float64).reshape(-1, rows, 2).sum(0)
            # All ranks of a pipeline have the same sums, so the quotient over all ranks equals the one over replicas.
            total = self._strategy.reduce(total.to(self._strategy.root_device), reduce_op="sum").cpu()
            if total[0, 1] > 0:
                self._model.log(name, float(total[0, 0] / total[0, 1]), prog_bar=True, batch_size=1)
            if name == _VALIDATION_LOSS:
                for metric, part in zip(metrics, of_metrics(metrics, total[1:]), strict=True):
                    if part[0, 1] > 0:
                        self._model.log(metric.label, metric.value(part), batch_size=1)
            own()

        return on_epoch_end
