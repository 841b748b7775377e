"""A LightningDataModule's datasets and collate functions; batch size, order and shares are the runner's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from runner.errors import Problem, RequestError

if TYPE_CHECKING:
    from runner.model.data import Collate

__all__ = ["Loaded", "loaded"]

Loaded = tuple[Any, "Collate"]
"""A dataset and what makes batches of its samples."""


def loaded(module: Any, target: str) -> tuple[Loaded, Loaded | None]:
    """What the module's training and validation loaders hold; None where it has no validation loader.

    Raises:
        RequestError: a loader is not one DataLoader, or draws samples in an order of its own.
    """
    module.prepare_data()
    module.setup("fit")
    train = _of_loader(module.train_dataloader(), "train_dataloader", target)
    if not _defines(module, "val_dataloader"):
        return train, None
    loader = module.val_dataloader()
    nothing = loader is None or (isinstance(loader, list) and not loader)
    return train, None if nothing else _of_loader(loader, "val_dataloader", target)


def _defines(module: Any, name: str) -> bool:
    """Lightning's own class has every hook; its loaders raise."""
    owner = next((base for base in type(module).__mro__ if name in vars(base)), None)
    return owner is not None and not owner.__module__.startswith(("lightning.", "pytorch_lightning."))


def _of_loader(loader: Any, hook: str, target: str) -> Loaded:
    if not isinstance(loader, DataLoader):
        why = f"{hook}() returned a {type(loader).__name__}"
        raise RequestError([Problem("data.target", target, "must have one DataLoader of each kind", why)])
    if not isinstance(loader.dataset, IterableDataset) and not _is_plain(loader):
        own = loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
        rule = "must leave the order of its samples to the runner"
        why = f"{hook}() draws them by a {type(own).__name__}; step k takes samples [kB, (k+1)B) in the seeded order"
        raise RequestError([Problem("data.target", target, rule, why)])
    # Without automatic batching the dataset's items are batches already.
    if loader.batch_size is None and loader.batch_sampler is None:
        rule, why = "must have samples, which the runner puts into batches", f"{hook}() has batch_size=None"
        raise RequestError([Problem("data.target", target, rule, why)])
    return loader.dataset, loader.collate_fn


def _is_plain(loader: DataLoader[Any]) -> bool:
    return type(loader.sampler) in (SequentialSampler, RandomSampler) and type(loader.batch_sampler) in (
        BatchSampler,
        type(None),
    )
