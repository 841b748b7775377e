"""Evaluates weights in one rank of any layout: loss and metrics of sets, or the outputs for all their samples."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runner.checkpoint.durable import durably
from runner.checkpoint.file import admitted, read_checkpoint
from runner.config.schema import RunConfig
from runner.engine.window import StepBatch
from runner.errors import Problem, RequestError, RunFailedError
from runner.files import write_atomically
from runner.model.boundary import flatten, map_tensors
from runner.model.seeds import seed_process
from runner.strategy.pipeline import EngineStrategy
from runner.training.averaging import AVERAGE
from runner.training.data.loading import close_loader
from runner.training.evaluation_request import RESULT_FILE, EvaluationRequest
from runner.training.rank_parts import EvaluationParts, load_evaluation_parts
from runner.training.run import set_up_logging
from runner.training.trainer import make_trainer

__all__ = ["read_weights", "run_evaluation"]

logger = logging.getLogger(__name__)

_PREFIXES = {"validation": "val", "test": "test", "train": "train"}


def run_evaluation(config: RunConfig, directory: Path) -> bool:
    """Evaluate as this process's rank; every rank calls it. Rank 0 writes the figures, or the outputs.

    Args:
        config: the request, with the layout.
        directory: holds the layer profile and the :class:`EvaluationRequest`.

    Returns:
        False: no signal stops an evaluation early.

    Raises:
        RequestError: the user's model, data or functions do not meet their contracts, or the weights are not theirs.
        RunFailedError: the outputs cannot be written.
    """
    asked = EvaluationRequest.load(directory)
    rank = int(os.environ.get("RANK", "0"))
    set_up_logging(rank)
    seed_process(config.seed)
    with admitted(config.checkpoint.allow_pickle):
        parts = load_evaluation_parts(config, directory, rank, asked.sets, outputs=asked.predictions is not None)
        content = read_weights(Path(asked.weights), averages=config.trainer.ema_decay is not None)
    weights = _Weights(content, asked.weights)
    try:
        if asked.predictions is not None:
            _predict(parts, weights, Path(asked.predictions))
        else:
            _measure(parts, weights, directory)
    finally:
        for loader in parts.loaders.values():
            close_loader(loader)
    return False


def read_weights(path: Path, *, averages: bool = False) -> dict[str, Any]:
    """The weights of a file in the form of a checkpoint: ``state_dict`` by global name, and what belongs to it.

    Args:
        path: a checkpoint, or a safetensors file.
        averages: whether a checkpoint's averages take the place of its weights, as in the run's own validations.

    Raises:
        RequestError: the file is no good safetensors file.
        CheckpointError: the checkpoint is damaged.
    """
    if path.suffix != ".safetensors":
        content = read_checkpoint(path)
        kept = content.get(AVERAGE, {}) if averages else {}
        state: dict[str, Tensor] = content["state_dict"]
        whole = state | {name: kept[name].to(state[name].dtype) for name in kept}
        return content | {"state_dict": whole}
    try:
        return {"state_dict": load_file(path), "global_step": 0}
    except (SafetensorError, OSError) as error:
        raise RequestError([Problem("--weights", path, "must be a good safetensors file", str(error))]) from error


class _Weights(Callback):
    """Loads the weights when the stages exist."""

    def __init__(self, content: dict[str, Any], path: str) -> None:
        self._content, self._path = content, path

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, EngineStrategy)
        try:
            strategy.load_model_state_dict(self._content | {"state_dict": self._of_layers(strategy)})
        except RequestError as error:
            told = [replace(problem, path="weights", value=self._path) for problem in error.problems]
            raise RequestError(told) from error

    def _of_layers(self, strategy: EngineStrategy) -> dict[str, Tensor]:
        """The weights of the model's layers, if all of them are there: in a pipeline, others belong to no rank."""
        assert strategy.engine is not None
        own = [name for module in strategy.engine.stages.values() for name in module.global_state()]
        names = {name for part in strategy.all_gather_objects(own) for name in part}
        state: dict[str, Tensor] = self._content["state_dict"]
        others = [name for name in state if name not in names]
        if not others or not names <= state.keys():
            return state
        logger.info("not in the model's layers, and not loaded: %s", ", ".join(others))
        return {name: state[name] for name in state if name in names}


def _measure(parts: EvaluationParts, weights: _Weights, directory: Path) -> None:
    """Rank 0 writes loss and metrics of every set by the names that the record has: ``val_loss``, ``test_NAME``."""
    trainer = make_trainer(parts.strategy, [weights], logger=False)
    found: dict[str, float] = {}
    for name, loader in parts.loaders.items():
        parts.module.val_losses, parts.module.val_metrics = [], {}
        trainer.validate(parts.module, loader, verbose=False)
        figures = {"loss": parts.module.val_losses, **parts.module.val_metrics}
        found |= {f"{_PREFIXES[name]}_{each}": values[-1][1] for each, values in figures.items() if values}
    if parts.strategy.global_rank == 0:
        write_atomically(directory / RESULT_FILE, json.dumps(found) + "\n")


def _predict(parts: EvaluationParts, weights: _Weights, file: Path) -> None:
    """Rank 0 writes the last layer's outputs in the order of the samples.

    The Trainer's own loop for predictions would replace the loader's sampler.
    """
    strategy, module = parts.strategy, parts.module
    kept: list[tuple[int, int, list[Tensor]]] = []

    def keep(batch: StepBatch, batch_idx: int) -> None:
        outputs = module.predict_step(batch, batch_idx)
        if outputs is not None:
            tensors = flatten(map_tensors(lambda tensor: tensor.detach().cpu(), outputs))[0]
            kept.append((batch_idx, strategy.replica, tensors))

    module.__dict__.update(validation_step=keep, on_validation_epoch_end=lambda: None)
    (loader,) = parts.loaders.values()
    make_trainer(strategy, [weights], logger=False).validate(module, loader, verbose=False)
    gathered = strategy.gather_objects(kept)
    if gathered is None:
        return
    batches = sorted((part for own in gathered for part in own), key=lambda part: part[:2])
    columns = [_joined(column) for column in zip(*(tensors for _, _, tensors in batches), strict=True)]
    _write(columns, file)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts[0].dim() else torch.stack(list(parts))


def _write(columns: Sequence[Tensor], file: Path) -> None:
    if file.suffix == ".npy":
        if len(columns) != 1:
            why = f"The model's output has {len(columns)} tensors, and a .npy file holds one"
            raise RequestError([Problem("FILE", file, "must end in .safetensors here", why)])
        with durably(file) as temporary, open(temporary, "wb") as stream:
            np.save(stream, (columns[0].float() if columns[0].dtype is torch.bfloat16 else columns[0]).numpy())
        return
    names = ["predictions"] if len(columns) == 1 else [f"predictions.{number}" for number in range(len(columns))]
    if not columns:
        raise RunFailedError("the set has no samples, so that there is nothing to predict")
    with durably(file) as temporary:
        save_file({name: value.contiguous() for name, value in zip(names, columns, strict=True)}, temporary)
