"""Finds out whether the shapes of what layers return depend on more than the shapes of their input."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from runner.config.schema import RunConfig
from runner.model.boundary import flatten, map_tensors
from runner.model.device import device_is_here, device_type
from runner.model.load import load_model
from runner.model.precision import autocast_of, autocasting, cast_module, dtype_of, to_precision
from runner.model.seeds import seeded
from runner.profile import ModelProfile
from runner.profiling.try_loss import first_samples

__all__ = ["FormWatch", "with_other_sizes"]


class FormWatch:
    """Calls a function, and notes whether what it returns has the same form every time.

    Args:
        function: takes the same input in every call.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._forms: set[Hashable] = set()

    def __call__(self, value: Any) -> Any:
        output = self._function(value)
        self._forms.add(_form_of(output))
        return output

    @property
    def varies(self) -> bool:
        """Whether it has returned values of several forms."""
        return len(self._forms) > 1


def _form_of(value: Any) -> Hashable:
    """The shapes and dtypes of the tensors in a value, and everything else in it."""
    tensors, structure = flatten(value)
    return tuple((str(tuple(tensor.shape)), tensor.dtype) for tensor in tensors), json.dumps(structure)


def with_other_sizes(config: RunConfig, profile: ModelProfile) -> tuple[Any, Any] | None:
    """Samples of which layers give other shapes or plain values than of as many other ones: those that take most bytes.

    Of the first samples, and of some that are spread over the data, equal numbers run through a model of their own.

    Returns:
        inputs and targets; None if all samples give the same, or that cannot be tried.
    """
    if not device_is_here(config):
        return None
    with seeded(config.seed, "try other samples"):
        try:
            found = [each for batch in first_samples(config, profile) for each in _outcomes(config, batch, profile)]
        except Exception:  # it is a note that is missing then: the run carries every shape
            return None
    if len({form for form, _, _ in found}) < 2:
        return None
    return max(found, key=lambda each: each[1])[2]


def _outcomes(
    config: RunConfig, batch: tuple[Any, Any], profile: ModelProfile
) -> Iterator[tuple[Hashable, int, tuple[Any, Any]]]:
    """For each micro-batch of some samples, what the layers give of it, in bytes too, and the micro-batch itself."""
    dtype, device = dtype_of(config.precision.name), torch.device(device_type(config))
    model = load_model(config, shard=0, logits=profile.divided_logits)
    modules = [cast_module(source.build(), dtype).to(device) for source in model.layers]
    count = flatten(batch[0])[0][0].shape[0]
    for start in range(0, count - profile.samples + 1, profile.samples):
        rows = slice(start, start + profile.samples)
        inputs, targets = (map_tensors(lambda tensor, rows=rows: tensor[rows], part) for part in batch)  # type: ignore[misc]
        value = to_precision(map_tensors(lambda tensor: tensor.to(device), inputs), dtype)
        forms, num_bytes = [], 0
        for source, module in zip(model.layers, modules, strict=True):
            with torch.no_grad():
                value = autocasting(source.calling(module), device.type, autocast_of(config.precision.name))(value)
            forms.append(_form_of(value))
            num_bytes += sum(tensor.nbytes for tensor in flatten(value)[0])
        yield tuple(forms), num_bytes, (inputs, targets)
