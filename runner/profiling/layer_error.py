"""Errors of a user's layers and loss while they are profiled, told as errors about one layer and its input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError
from runner.model.boundary import CannotPassError, shapes
from runner.model.by_value import by_value
from runner.model.out_of_range import out_of_range
from runner.model.targets import in_short
from runner.plan.layout.batches import largest_microbatch
from runner.plan.layout.single_samples import with_two_samples

__all__ = ["LayerError", "about_layer", "about_loss", "refusing"]

_OF_ONE = "more than 1 value per channel"  # what torch asks for where a batch norm has one sample
_HEADS = {"num_key_value_heads": "heads of keys and values", "num_attention_heads": "heads of attention"}


class LayerError(Exception):
    """A layer, or the loss (``index`` None), does not accept its input."""

    def __init__(self, index: int | None, what: str, given: Any, cause: Exception, module: nn.Module | None) -> None:
        self.index = index
        self.layer = what
        self.heads = list(_heads(module)) if module is not None else []
        self.is_divided = module is not None and any(hasattr(each, "shard_group") for each in module.modules())
        self.rule = f"{what} must take what {'comes before it' if index != 0 else 'the data gives'}"
        if isinstance(cause, CannotPassError):
            self.rule = f"{what} must return what can pass to the next layer"
            super().__init__(str(cause)[:1].upper() + str(cause)[1:])
            return
        known = out_of_range(cause, module) or by_value(cause)
        said = known if known is not None else f"it raised {in_short(cause)}"
        if index is None and hasattr(given[0], "logits"):
            said += "; a model of transformers may return its logits alone, model(ids, use_cache=False).logits"
        super().__init__(f"Given {shapes(given)}, {said}")


@contextmanager
def about_layer(index: int, module: nn.Module, given: Any) -> Iterator[None]:
    """Turn errors of the layer in the block into a :class:`LayerError`; RequestErrors pass unchanged."""
    with _named(index, f"layer {index} ({type(module).__name__})", given, module):
        yield


@contextmanager
def about_loss(given: Any) -> Iterator[None]:
    """Turn errors of the loss in the block into a :class:`LayerError`; RequestErrors pass unchanged."""
    with _named(None, "the loss", given, None):
        yield


@contextmanager
def _named(index: int | None, what: str, given: Any, module: nn.Module | None) -> Iterator[None]:
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise LayerError(index, what, given, error, module) from error


@contextmanager
def refusing(config: RunConfig) -> Iterator[None]:
    """Turn a :class:`LayerError` of the block into a problem with the request's model or loss."""
    try:
        yield
    except LayerError as error:
        if error.is_divided:
            raise RequestError([_cannot_be_divided(config, error)]) from error.__cause__
        path, value = ("model.target", config.model.target) if error.index is not None else _loss(config)
        why, fix = str(error), ""
        samples = config.data.batch_size
        if _OF_ONE in why and largest_microbatch(samples, config.parallelism.data, config.schedule.parts) == 1:
            why, fix = f"Each micro-batch has one sample. {why}", with_two_samples(config, samples)
        raise RequestError([Problem(path, value, error.rule, why, fix)]) from error.__cause__


def _loss(config: RunConfig) -> tuple[str, str]:
    """The key that chose the loss, and its value: a shipped one has its name."""
    target = config.loss.target
    return ("loss", config.loss.name) if target.startswith("runner.") else ("loss.target", target)


def _heads(module: nn.Module) -> Iterator[tuple[str, int]]:
    """What a model of transformers says of its heads: which, and how many."""
    for config in (getattr(each, "config", None) for each in module.modules()):
        for key, name in _HEADS.items():
            if isinstance(count := getattr(config, key, None), int):
                yield name, count


def _cannot_be_divided(config: RunConfig, error: LayerError) -> Problem:
    degree = config.parallelism.tensor
    most = degree // 2
    why = f"{error}: its code may count on features, or heads, of which a rank has only a part"
    for name, count in error.heads:
        if count % degree:
            why, most = f"Its {count} {name} cannot be divided by {degree}", math.gcd(count, degree)
            break
    return Problem("parallelism.tensor", degree, f"must divide {error.layer}", why, f"parallelism.tensor={most}")
