"""A user's dataset and loss as the engine uses them; no loaders here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from runner.config.schema import DataConfig, LossConfig
from runner.errors import Problem, RequestError
from runner.model.targets import call_target, import_target

__all__ = ["Datasets", "LossFunction", "example_batch", "load_datasets", "load_loss", "loss_sum"]

LossFunction = Callable[[Any, Any], "Tensor | tuple[Tensor, Tensor | float]"]


@dataclass(frozen=True)
class Datasets:
    """Map-style datasets of ``(input, target)``; ``validation`` may be missing."""

    train: Any
    validation: Any | None


def load_datasets(config: DataConfig) -> Datasets:
    """Call the user's data function.

    Raises:
        RequestError: it returns neither a dataset, a pair of them, nor a LightningDataModule.
    """
    made = call_target("data", config.target, config.kwargs)
    if hasattr(made, "train_dataloader") and hasattr(made, "setup"):
        made = _from_datamodule(made)
    train, validation = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for dataset in (train, validation):
        has_items = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if dataset is not None and (isinstance(dataset, IterableDataset) or not has_items):
            rule = "must return a map-style dataset, (train, val), or a LightningDataModule"
            why = f"A {type(dataset).__name__} has no items by number, and steps and ranks are dealt theirs by number"
            raise RequestError([Problem("data.target", config.target, rule, why)])
    if len(train) == 0:
        raise RequestError([Problem("data.target", config.target, "must have at least one sample")])
    return Datasets(train, validation if validation is not None and len(validation) else None)


def _from_datamodule(module: Any) -> tuple[Any, Any]:
    """A LightningDataModule's datasets; the batches are the runner's own (``data.batch_size``)."""
    module.prepare_data()
    module.setup("fit")
    train = module.train_dataloader().dataset
    loader = module.val_dataloader() if hasattr(module, "val_dataloader") else None
    return train, getattr(loader, "dataset", None)


def example_batch(config: DataConfig, samples: int) -> tuple[Any, Any]:
    """One ``(input, target)`` batch of the right shapes, for profiles.

    A data function may carry an attribute ``spec``, called with the same arguments, that returns one sample without
    preparing any data; else the first sample of the dataset is used.
    """
    spec = getattr(import_target("data.target", config.target), "spec", None)
    sample = spec(**config.kwargs) if callable(spec) else load_datasets(config).train[0]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        why = f"The first one is a {type(sample).__name__}"
        raise RequestError([Problem("data.target", config.target, "must have samples (input, target)", why)])
    batch = default_collate([tuple(sample)] * max(1, samples))
    return batch[0], batch[1]


def load_loss(config: LossConfig) -> LossFunction:
    """The loss function; its section's ``kwargs`` are bound to it."""
    function = import_target("loss.target", config.target)
    kwargs = dict(config.kwargs)
    return (lambda output, target: function(output, target, **kwargs)) if kwargs else function


def loss_sum(loss: Any, num_samples: int) -> tuple[Tensor, Tensor | float]:
    """``(sum, weight)`` of what a loss function returned: a mean counts with its samples as weight.

    Raises:
        RequestError: it is neither a scalar nor a pair of a scalar and a weight.
    """
    if isinstance(loss, tuple) and len(loss) == 2:
        total, weight = loss
    else:
        total, weight = loss, None
    if not isinstance(total, Tensor) or total.numel() != 1:
        shown = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        rule = "must return a scalar mean over its samples, or (sum, weight)"
        raise RequestError([Problem("loss.target", shown, rule, fix="loss=cross_entropy")])
    total = total.reshape(())
    if weight is None:
        return total * num_samples, float(num_samples)
    return total, weight.detach() if isinstance(weight, torch.Tensor) else float(weight)
