"""What the profile says of the optimizer: the bytes of its states, and what its updates make and drop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache, partial
from math import prod
from typing import Any

import torch

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.model.apart import ApartError, EndedError, apart
from runner.model.fake import fake_tensors
from runner.model.lightning_module import optimizers_in, with_one_optimizer
from runner.model.load import load_model
from runner.model.own_methods import brings
from runner.model.precision import dtype_of
from runner.optim.build import observed_state_ratio, over_other_parameters, state_bytes_per_gradient_byte
from runner.optim.catalogue.kind import ERROR_WIDTH
from runner.optim.catalogue.registry import optimizer_of
from runner.profile import ModelProfile, OwnUpdate
from runner.profiling.fills import FillProfiler
from runner.profiling.own_updates import observed_update, state_bytes_of_shape
from runner.profiling.try_optimizer import try_own_optimizer

__all__ = ["fill_profiler_of", "optimizer_figures", "state_bytes_of"]

logger = logging.getLogger(__name__)


def optimizer_figures(config: RunConfig, profile: ModelProfile) -> dict[str, Any]:
    """What the profile of a request says of its optimizer, by field.

    Args:
        config: the request.
        profile: the profile of its layers.
    """
    own = _observed_own(config) if config.optimizer.name == "auto" else None
    states, master = _state_ratios(config, dtype_of(config.precision.name), own[0] if own else None)
    return {
        "own_update": own[1] if own else _own_update(config),
        "optimizer_bytes_per_gradient_byte": states,
        "states_per_gradient_byte": _late_states(config, master),
        "master_bytes_per_gradient_byte": master,
        "optimizer_constant_bytes": _table_bytes(config, profile),
    }


def _table_bytes(config: RunConfig, profile: ModelProfile) -> int:
    """The bytes of the optimizer's tables, which small tensors do not need."""
    kind = optimizer_of(config.optimizer)
    shapes = [shape for layer in (*profile.layers, profile.loss) for shape in layer.trained_shapes]
    return kind.constant_bytes if any(prod(shape) >= kind.table_elements for shape in shapes) else 0


def _state_ratios(config: RunConfig, dtype: torch.dtype, own: float | None = None) -> tuple[float, float]:
    """Bytes per byte of gradient: first of optimizer states, masters and averaged weights, then of masters alone.

    Args:
        own: bytes of the states of a module's own optimizer; None: the request's is used.
    """
    wide = torch.float32.itemsize / dtype.itemsize
    master = wide if PRECISIONS[config.precision.name].master_weights else 0.0
    average = wide if config.trainer.ema_decay is not None else 0.0
    states = own if own is not None else state_bytes_per_gradient_byte(config.optimizer, master)
    return states + average, master


def _late_states(config: RunConfig, master: float) -> float:
    """Bytes per byte of gradient of states that are made with a weight's first gradient, without what is always there.

    torch's own optimizers make them so, those with ``by_weight``; of others it is not known.
    """
    is_known = optimizer_of(config.optimizer).by_weight and config.optimizer.target is None
    return state_bytes_per_gradient_byte(config.optimizer, master) - master if is_known else 0.0


def state_bytes_of(config: RunConfig, dtype: torch.dtype) -> Callable[[torch.Size], int] | None:
    """A function from the shape of a parameter to its state bytes, or None if a ratio is exact.

    It counts what :func:`_state_ratios` counts.
    """
    kind = optimizer_of(config.optimizer)
    count = kind.count_bytes
    if kind.profiler is not None or (count and kind.state_bytes is None):
        per_byte = _state_ratios(config, dtype)[0]
        return lambda shape: math.ceil(per_byte * dtype.itemsize * shape.numel()) + count
    wide = torch.float32.itemsize
    masters = PRECISIONS[config.precision.name].master_weights
    copies = wide * (masters + (config.trainer.ema_decay is not None))
    of_axes, own = kind.values_by_axes, kind.state_bytes
    if kind.values is None and config.optimizer.target is not None and own is None:
        return _observing(config, wide * (config.trainer.ema_decay is not None), masters, dtype)
    if of_axes is not None:
        width = wide if masters else dtype.itemsize
        return lambda shape: math.ceil((of_axes(len(shape)) * width + copies) * shape.numel())
    if own is None:
        return None
    # Compression errors of a 1-bit optimizer: of all that a rank sends, and of its chunk of the average.
    errors = ERROR_WIDTH * (1 + 1 / config.parallelism.data) if kind.compresses else 0.0
    return lambda shape: own(shape.numel()) + math.ceil((copies + errors) * shape.numel()) + count


def _observing(config: RunConfig, averaged: int, masters: bool, dtype: torch.dtype) -> Callable[[torch.Size], int]:
    """The bytes of states, masters and averaged weights of a parameter, for an optimizer of a user's function."""
    make = partial(optimizer_of(config.optimizer).make, config.optimizer)
    updated, copies = torch.float32 if masters else dtype, averaged + torch.float32.itemsize * masters

    @cache
    def states(shape: torch.Size) -> int:
        try:
            found = state_bytes_of_shape(make, shape, updated)
        except Exception:  # it asks for values
            found = math.ceil(observed_state_ratio(make) * updated.itemsize * shape.numel())
        return found + copies * shape.numel()

    return states


def fill_profiler_of(config: RunConfig) -> FillProfiler | None:
    """What profiles the work that the optimizer does for layers besides its update; None: it does none."""
    make = optimizer_of(config.optimizer).profiler
    return None if make is None else make()


def _own_update(config: RunConfig) -> OwnUpdate | None:
    """What updates of the request's optimizer make and drop; None: its kind says it, or it is not known."""
    kind = optimizer_of(config.optimizer)
    if kind.values is not None or config.optimizer.target is None or kind.at_once is not None:
        return None
    try:
        return observed_update(partial(kind.make, config.optimizer))
    except RequestError:
        raise
    except Exception as error:  # it may want other weights; the ranks tell
        logger.info("what an update makes and drops is assumed to be as much as AdamW's: %s", error)
        return None


def _observed_own(config: RunConfig) -> tuple[float, OwnUpdate] | None:
    """What the optimizer of a LightningModule's ``configure_optimizers`` needs; None if unknown or absent."""
    try:
        with suppress(EndedError):
            return apart(_observed_of_module, config)
        return apart(_observed_of_module, config, fake=False)
    except ApartError as error:
        logger.info("the states of the model's own optimizer are assumed to be as large as AdamW's: %s", error)
        return None


def _observed_of_module(config: RunConfig, *, fake: bool = True) -> tuple[float, OwnUpdate] | None:
    with fake_tensors() if fake else nullcontext():
        try:
            module = load_model(config, cut=False).module
        except RequestError:
            raise
        except Exception:  # profiling tells it
            return None
        if module is None or not brings(module, "configure_optimizers"):
            return None
        made = with_one_optimizer(module.configure_optimizers(), config.model.target)
        (optimizer,) = optimizers_in(made)
    make = partial(over_other_parameters, optimizer)
    try_own_optimizer(config, make, "model.target", f"{config.model.target} ({type(optimizer).__name__})")
    return observed_state_ratio(make), observed_update(make)
