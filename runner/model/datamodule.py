"""Takes datasets and collate functions from a LightningDataModule; batch size and order are the runner's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from runner.errors import Problem, RequestError

if TYPE_CHECKING:
    from runner.model.data import Collate

__all__ = ["Loaded", "loaded"]

Loaded = tuple[Any, "Collate"]
"""A dataset, and the function that makes a batch from its samples."""

_TRANSFERS = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
_OF_TORCH, _OF_TORCHDATA = "torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler"
_SAMPLERS = (f"{_OF_TORCH}.SequentialSampler", f"{_OF_TORCH}.RandomSampler", f"{_OF_TORCHDATA}.RandomSampler")
_BATCH_SAMPLERS = (f"{_OF_TORCH}.BatchSampler", f"{_OF_TORCHDATA}.BatchSampler")
"""The classes of what a loader makes for itself; a StatefulDataLoader has some of its own."""


def loaded(module: Any, target: str, *, with_test: bool = False) -> tuple[Loaded, Loaded | None, Loaded | None]:
    """The contents of the module's training, validation and test loaders; None for one that it does not have.

    Args:
        module: the LightningDataModule.
        target: names the function that made it, for messages.
        with_test: whether its test set is prepared and loaded, too.

    Raises:
        RequestError: a loader is not a single DataLoader, or draws samples in its own order; or the module changes
            batches, or keeps a state.
    """
    for hook in _TRANSFERS:
        if _defines(module, hook):
            why = "It is not called: batches come from the loaders' datasets and go to the engine as they are"
            fix = "changing samples in the dataset, or batches in the collate_fn of the loader"
            raise RequestError([Problem("data.target", target, f"must not define {hook}", why, fix)])
    module.prepare_data()
    module.setup("fit")
    if _defines(module, "state_dict") and module.state_dict():
        why = "It is not saved: a run continues at the step's samples, or by the dataset's own state_dict"
        fix = "keeping that state in the dataset"
        raise RequestError([Problem("data.target", target, "must have no state_dict of its own", why, fix)])
    train = _of_loader(module.train_dataloader(), "train_dataloader", target)
    validation = _held_out(module, "val_dataloader", target)
    if not with_test or not _defines(module, "test_dataloader"):
        return train, validation, None
    module.setup("test")
    return train, validation, _held_out(module, "test_dataloader", target)


def _held_out(module: Any, hook: str, target: str) -> Loaded | None:
    """The contents of a loader that the user's class may leave out, or that may be empty."""
    if not _defines(module, hook):
        return None
    loader = getattr(module, hook)()
    nothing = loader is None or (isinstance(loader, list) and not loader)
    return None if nothing else _of_loader(loader, hook, target)


def _defines(module: Any, name: str) -> bool:
    """Whether the user's class defines the hook; Lightning's own class has every hook, but its loaders raise."""
    owner = next((base for base in type(module).__mro__ if name in vars(base)), None)
    return owner is not None and not owner.__module__.startswith(("lightning.", "pytorch_lightning."))


def _of_loader(loader: Any, hook: str, target: str) -> Loaded:
    if not isinstance(loader, DataLoader):
        why = f"{hook}() returned a {type(loader).__name__}"
        raise RequestError([Problem("data.target", target, "must have one DataLoader of each kind", why)])
    if not isinstance(loader.dataset, IterableDataset) and not _is_plain(loader):
        own = loader.sampler if _class_of(loader.batch_sampler) in _BATCH_SAMPLERS else loader.batch_sampler
        rule = "must leave the order of its samples to the runner"
        why = f"{hook}() draws them by a {type(own).__name__}; step k takes samples [kB, (k+1)B) in the seeded order"
        raise RequestError([Problem("data.target", target, rule, why)])
    if loader.worker_init_fn is not None and loader.num_workers:
        rule, why = "must leave worker_init_fn out", f"{hook}() has one, which no worker would call"
        fix = "preparing workers in the dataset, whose samples are seeded one by one"
        raise RequestError([Problem("data.target", target, rule, why, fix)])
    # Without automatic batching, the items of the dataset are already batches.
    if loader.batch_size is None and loader.batch_sampler is None:
        rule, why = "must have samples, which the runner puts into batches", f"{hook}() has batch_size=None"
        raise RequestError([Problem("data.target", target, rule, why)])
    return loader.dataset, loader.collate_fn


def _is_plain(loader: DataLoader[Any]) -> bool:
    batches = loader.batch_sampler
    return _class_of(loader.sampler) in _SAMPLERS and (batches is None or _class_of(batches) in _BATCH_SAMPLERS)


def _class_of(sampler: Any) -> str:
    return f"{type(sampler).__module__}.{type(sampler).__qualname__}"
