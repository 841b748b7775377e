"""A user's dataset and loss in the form that the engine uses; data loaders are made elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from runner.config.schema import DataConfig, LossConfig
from runner.errors import Problem, RequestError, RunFailedError, RunnerError, raise_problems
from runner.model.boundary import flatten, shapes
from runner.model.datamodule import Loaded, loaded
from runner.model.figures import bare
from runner.model.seeds import seeded
from runner.model.targets import call_function, call_target, explained, refuse_unknown_arguments
from runner.reads import hearing
from runner.targets import import_target, with_environment

__all__ = [
    "Collate",
    "Datasets",
    "Example",
    "LossFunction",
    "checked_weight",
    "collated",
    "example_batch",
    "example_of",
    "first_sample",
    "is_promised",
    "load_datasets",
    "load_loss",
    "loss_sum",
]

LossFunction = Callable[[Any, Any], "Tensor | tuple[Tensor, Tensor | float]"]


Collate = Callable[[list[Any]], Any]

_LOOKED_AT = 16  # samples of which the largest stands for all in a profile


@dataclass(frozen=True)
class Datasets:
    """The user's data; ``validation`` and ``test`` may be missing.

    Args:
        train, validation, test: map-style or iterable datasets.
        collate, validation_collate, test_collate: functions from samples to a batch ``(input, target)``.
    """

    train: Any
    validation: Any | None
    collate: Collate = default_collate
    validation_collate: Collate = default_collate
    test: Any | None = None
    test_collate: Collate = default_collate

    @property
    def streams(self) -> bool:
        """Whether the training dataset is iterable, so that its samples come only in its own order."""
        return isinstance(self.train, IterableDataset)


def load_datasets(config: DataConfig, seed: int, *, with_test: bool = False) -> Datasets:
    """Call the user's data function, with random generators that are seeded alike on every rank.

    Args:
        config: names the function.
        seed: the run's seed.
        with_test: whether a LightningDataModule is asked for its test set, too.

    Raises:
        RequestError: it returns neither a dataset, two or three of them, nor a LightningDataModule.
    """
    with seeded(seed, "data"):
        return _made_datasets(config, with_test)


def _made_datasets(config: DataConfig, with_test: bool) -> Datasets:
    made = call_target("data", config.target, config.kwargs)
    if hasattr(made, "train_dataloader") and hasattr(made, "setup"):
        (train, collate), validation, test = _loaded(made, config.target, with_test)
        found = Datasets(train, None, collate)
        if validation is not None:
            found = replace(found, validation=validation[0], validation_collate=validation[1])
        if test is not None:
            found = replace(found, test=test[0], test_collate=test[1])
    else:
        several = isinstance(made, tuple) or (
            isinstance(made, list) and all(isinstance(each, Dataset) for each in made)
        )
        train, validation, *more = made if several and len(made) in (2, 3) else (made, None)
        found = Datasets(train, validation, test=more[0] if more else None)
    if config.collate is not None:
        collate = import_target("data.collate", config.collate)
        found = replace(found, collate=collate, validation_collate=collate, test_collate=collate)
    raise_problems(_problems(found, config))
    return replace(found, validation=_unless_empty(found.validation), test=_unless_empty(found.test))


def _unless_empty(dataset: Any | None) -> Any | None:
    return None if hasattr(dataset, "__len__") and not len(dataset) else dataset  # type: ignore[arg-type]


def _loaded(module: Any, target: str, with_test: bool) -> tuple[Loaded, Loaded | None, Loaded | None]:
    try:
        return loaded(module, target, with_test=with_test)
    except RunnerError:
        raise
    except Exception as error:
        raise RequestError([Problem("data.target", target, "must prepare its data", explained(error))]) from error


def _problems(found: Datasets, config: DataConfig) -> Iterator[Problem]:
    for dataset in (found.train, found.validation, found.test):
        has_items = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if dataset is None and found.train is not None:
            continue
        if isinstance(dataset, IterableDataset):
            samples: object = iter(dataset)
            if samples is dataset:
                rule = "must give its samples anew each time it is iterated"
                why = f"iter() of the {type(dataset).__name__} is itself, so that a second epoch would find it used up"
                yield Problem("data.target", config.target, rule, why)
        elif not has_items:
            rule = "must return a map-style or iterable dataset, two or three of them, or a LightningDataModule"
            why = f"A {type(dataset).__name__} has no items by number and is no torch.utils.data.IterableDataset"
            yield Problem("data.target", config.target, rule, why)
        elif dataset is found.train and not len(dataset):
            yield Problem("data.target", config.target, "must have at least one sample")
    if config.drop_last and found.streams:
        why = "It is one endless epoch, whose end is not known before it comes"
        yield Problem("data.drop_last", True, "must be false for an iterable dataset", why, "data.drop_last=false")
    elif config.drop_last and hasattr(found.train, "__len__") and 0 < len(found.train) < config.batch_size:
        why = f"The {len(found.train)} training samples are fewer than data.batch_size = {config.batch_size}"
        yield Problem("data.drop_last", True, "must leave a step of every epoch", why, "data.drop_last=false")
    if found.streams and config.shuffle:
        rule = "must be null or false for an iterable dataset"
        why = "Its samples come in its own order; only a dataset with numbered items can be shuffled"
        yield Problem("data.shuffle", config.shuffle, rule, why, "data.shuffle=null")


def is_promised(config: DataConfig) -> bool:
    """Whether the data function says by its ``spec`` what a sample is, so that its data need not be there yet."""
    return callable(getattr(import_target("data.target", config.target), "spec", None))


def first_sample(dataset: Any) -> Any:
    """The first sample of a dataset of either kind.

    Raises:
        StopIteration: an iterable dataset has none.
    """
    return next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]


class Example(NamedTuple):
    """A batch for profiles: one sample again and again.

    Args:
        inputs, targets: the batch.
        looked_at: how many samples were looked at, of which this is the largest. It is 0 if all have one size.
    """

    inputs: Any
    targets: Any
    looked_at: int = 0


def example_batch(config: DataConfig, samples: int, seed: int) -> tuple[Any, Any]:
    """The inputs and targets of :func:`example_of`."""
    inputs, targets, _ = example_of(config, samples, seed)
    return inputs, targets


def example_of(config: DataConfig, samples: int, seed: int) -> Example:
    """One batch with the right shapes, for profiles.

    A data function may carry an attribute ``spec``, called with the same arguments, that returns one sample without
    preparing any data. Otherwise the first sample of the dataset is used or, if samples have different sizes, the
    largest of the first ones and of some that are spread over the dataset. All of it draws random numbers by ``seed``.
    """
    with seeded(seed, "example"), hearing():
        return _one_batch(config, samples, seed)


def _one_batch(config: DataConfig, samples: int, seed: int) -> Example:
    spec = getattr(import_target("data.target", config.target), "spec", None)
    looked_at = 0
    if callable(spec):
        sample = call_function("data", config.target, spec, config.kwargs)
        collate = import_target("data.collate", config.collate) if config.collate is not None else default_collate
    else:
        datasets = load_datasets(config, seed)
        sample, collate = _example(datasets.train, config), datasets.collate
        found = [(_size(sample), sample), *((_size(other), other) for other in _further_samples(datasets.train))]
        if len({size for size, _ in found}) > 1:
            looked_at, sample = len(found), max(found, key=lambda each: each[0])[1]
    return Example(*checked_batch([sample] * max(1, samples), collate, config), looked_at)


def _further_samples(dataset: Any) -> Iterator[Any]:
    """Samples beside the first one: the next, and some that are spread over all of a dataset with numbered items."""
    with suppress(Exception):  # a broken sample is told where the run meets it
        if isinstance(dataset, IterableDataset):
            yield from islice(iter(dataset), 1, _LOOKED_AT // 2)
            return
        length = len(dataset)
        spread = [number * (length - 1) // (_LOOKED_AT // 2) for number in range(1, _LOOKED_AT // 2 + 1)]
        for number in sorted({*range(1, min(_LOOKED_AT // 2, length)), *spread} - {0}):
            yield dataset[number]


def _size(sample: Any) -> int:
    """The bytes of a sample's tensors and arrays, and the lengths of its words and lists."""
    if isinstance(sample, Mapping):
        return sum(map(_size, sample.values()))
    if isinstance(sample, tuple | list):
        return len(sample) + sum(_size(each) for each in sample if not isinstance(each, int | float))
    if isinstance(sample, str | bytes):
        return len(sample)
    size = getattr(sample, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _example(dataset: Any, config: DataConfig) -> Any:
    try:
        return first_sample(dataset)
    except StopIteration:
        raise RequestError([Problem("data.target", config.target, "must have at least one sample")]) from None
    except Exception as error:
        why = f"Its first one raised {explained(error)}"
        raise RequestError([Problem("data.target", config.target, "must have samples that load", why)]) from error


def checked_batch(samples: list[Any], collate: Collate, config: DataConfig, named: str = "samples") -> tuple[Any, Any]:
    """The batch ``(input, target)`` of at least one sample of a request's data; ``named`` is what messages call them.

    Raises:
        RequestError: the samples do not make such a batch.
    """
    sample = samples[0]
    if collate is default_collate and (not isinstance(sample, tuple | list) or len(sample) != 2):
        why = f"The first one is a {type(sample).__name__}"
        fix = "data.collate=package.module:function, which makes (input, target) of a list of samples"
        raise RequestError([Problem("data.target", config.target, f"must have {named} (input, target)", why, fix)])
    path = "data.target" if collate is default_collate else "data.collate"
    value = config.target if path == "data.target" else config.collate
    try:
        return collated(samples, collate)
    except RunFailedError as error:
        rule = f"must give a batch (input, target) with its {named} on the first axis of every tensor"
        raise RequestError([Problem(path, value, rule, str(error))]) from error
    except Exception as error:
        why = f"Collating {len(samples)} samples raised {explained(error)}"
        raise RequestError([Problem(path, value, f"must have {named} that make a batch", why)]) from error


def collated(samples: Sequence[Any], collate: Collate) -> tuple[Any, Any]:
    """The batch ``(input, target)`` of at least one sample.

    Raises:
        RunFailedError: the result is not such a batch.
    """
    if collate is default_collate:
        for sample in samples:
            if not isinstance(sample, tuple | list) or len(sample) != 2:
                raise RunFailedError(f"a sample of the dataset must be (input, target), not a {type(sample).__name__}")
        samples = [tuple(sample) for sample in samples]
    try:
        batch = collate(list(samples))
    except RuntimeError as error:
        ragged = _ragged(samples) if collate is default_collate else ""
        if not ragged:
            raise
        raise RunFailedError(ragged) from error  # torch's own message in a loader worker does not show the shapes
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise RunFailedError(f"a batch must be (input, target); data.collate made a {type(batch).__name__}")
    for tensor in flatten(batch)[0]:
        if tensor.dim() == 0 or len(tensor) != len(samples):
            found = f"a tensor of shape {tuple(tensor.shape)}"
            raise RunFailedError(
                f"a batch of {len(samples)} samples has them on the first axis of every tensor: {found}"
            )
    return batch[0], batch[1]


def _ragged(samples: Sequence[Any]) -> str:
    """How the samples of a batch differ in shape; empty if they do not."""
    first = shapes(samples[0])
    for sample in samples[1:]:
        if shapes(sample) != first:
            why = f"one is {first}, another {shapes(sample)}"
            return f"the samples of a batch must have the same shapes: {why}; data.collate can pad them"
    return ""


def load_loss(config: LossConfig) -> LossFunction:
    """The loss function, with its section's ``kwargs`` bound to it.

    Raises:
        RequestError: there is no such function, or it is a class.
    """
    function = import_target("loss.target", config.target)
    if isinstance(function, type):
        rule, why = (
            "must be a function of output and target",
            f"{function.__name__} is a class, to be made without them",
        )
        fix = f"an object of it in a module of yours, loss = {function.__name__}(), as loss.target=mine:loss"
        raise RequestError([Problem("loss.target", config.target, rule, why, fix)])
    refuse_unknown_arguments("loss", function, config.kwargs)
    kwargs = with_environment(config.kwargs)
    return (lambda output, target: function(output, target, **kwargs)) if kwargs else function


def loss_sum(loss: Any, num_samples: int) -> tuple[Tensor, Tensor | float]:
    """``(sum, weight)`` from the return value of a loss function; a mean gets its number of samples as weight.

    Raises:
        RequestError: the value is neither a scalar nor a pair of a scalar and a weight.
    """
    loss = bare(loss)
    total, weight = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if not isinstance(total, Tensor) or total.numel() != 1 or total.is_complex():
        raise RequestError([_no_scalar(loss, total, num_samples)])
    total = total.reshape(())
    if weight is None:
        return total * num_samples, float(num_samples)
    return total, _counted(weight)


_RETURNS = "must return a scalar mean over its samples, or (sum, weight)"


def _no_scalar(loss: Any, total: Any, num_samples: int) -> Problem:
    """What is wrong with a return value that has no scalar sum, with what would be right in its place."""
    if isinstance(loss, Tensor) and loss.numel() != 1:
        why = f"It has a value for each of {num_samples} samples" if len(loss) == num_samples else "It has many values"
        return Problem("loss.target", f"shape {tuple(loss.shape)}", _RETURNS, why, "return loss.mean()")
    if isinstance(loss, Mapping):
        key = "loss" if "loss" in loss else next(iter(loss), "loss")
        why = f"It returned a dict with {', '.join(map(str, loss)) or 'nothing'}"
        return Problem("loss.target", type(loss).__name__, _RETURNS, why, f'return made["{key}"]')
    if isinstance(loss, tuple | list) and len(loss) > 1 and not (isinstance(loss, tuple) and len(loss) == 2):
        why = f"It returned {len(loss)} values; terms are added up to one"
        return Problem("loss.target", type(loss).__name__, _RETURNS, why, "return the sum of the terms")
    shown = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
    if isinstance(total, Tensor) and total.is_complex():
        shown = str(total.dtype).removeprefix("torch.")
    return Problem("loss.target", shown, _RETURNS, fix="loss=cross_entropy")


def _counted(weight: Any) -> Tensor | float:
    """The weight of a pair as a scalar without a gradient.

    Raises:
        RequestError: it is none: it requires a gradient as the terms of a loss do, or is no number.
    """
    rule = "must return (sum, weight) with a weight that counts what the sum is over"
    if isinstance(weight, Tensor):
        if weight.requires_grad:
            why = "the second value requires a gradient, as a term of the loss does: terms are added up to one"
            raise RequestError([Problem("loss.target", "a pair", rule, why, "return first + second")])
        if weight.numel() != 1 or weight.is_complex():
            why = f"the second value has the shape {tuple(weight.shape)}" if weight.numel() != 1 else "it is complex"
            raise RequestError([Problem("loss.target", "a pair", rule, why, "return total, weight.sum()")])
        return weight.detach().reshape(())
    try:
        return float(weight)
    except (TypeError, ValueError):
        why = f"the second value is a {type(weight).__name__}"
        raise RequestError([Problem("loss.target", "a pair", rule, why, "return total, count")]) from None


def checked_weight(weight: float) -> float:
    """``weight`` if it can be one: it is finite and not below 0.

    Raises:
        RequestError: it cannot.
    """
    if not 0.0 <= weight < math.inf:
        rule = "must return (sum, weight) with a weight that is finite and not below 0"
        raise RequestError([Problem("loss.target", f"weight {weight:g}", rule, "What does not count has the weight 0")])
    return weight
