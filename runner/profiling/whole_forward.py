"""Compares what a model's own forward gives with what its listed layers give, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import Problem, RequestError
from runner.model.boundary import flatten
from runner.model.layers import call_whole
from runner.model.lightning_module import is_lightning_module
from runner.model.load import LoadedModel
from runner.model.modes import evaluating

__all__ = ["refuse_another_forward"]

_TOLERANCE = 256  # times the rounding of the output's format, at its largest value


def refuse_another_forward(model: LoadedModel, value: Any, target: str) -> None:
    """Refuse a model whose ``forward`` does something else than its ``layers()``, which are what is trained.

    A LightningModule's forward is left out: it is for predictions. So is one that takes something else than the data
    gives, or returns something else than the last layer.

    Args:
        model: the model, whose layers have been cast and are on the device.
        value: the input of a first batch.
        target: the model's function, for the message.

    Raises:
        RequestError: the two differ.
    """
    made, layers = model.made, [source.given for source in model.layers if source.given is not None]
    if len(layers) < len(model.layers) or model.layers[0].spread or not _has_own_forward(made):
        return
    with evaluating([made, *layers]), torch.no_grad():
        try:
            whole, chained = flatten(call_whole(made, value))[0], flatten(_chained(layers, value))[0]
        except Exception:  # it may take something else, and what layers raise is told elsewhere
            return
    if not _are_alike(whole, chained):
        rule = "must have a forward that runs its layers() one after the other, or none"
        why = "They are what is trained, and on a first batch they give something else than forward"
        raise RequestError([Problem("model.target", target, rule, why)])


def _has_own_forward(made: Any) -> bool:
    if not isinstance(made, nn.Module) or is_lightning_module(made):
        return False
    return type(made).forward not in (nn.Module.forward, nn.Sequential.forward)


def _chained(layers: Sequence[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def _are_alike(whole: Sequence[Tensor], chained: Sequence[Tensor]) -> bool:
    """Whether two outputs of the same form are equal up to rounding; of other forms they cannot be compared."""
    if [(each.shape, each.dtype) for each in whole] != [(each.shape, each.dtype) for each in chained]:
        return True
    pairs = [pair for pair in zip(whole, chained, strict=True) if pair[0].is_floating_point() and pair[0].numel()]
    return all(
        torch.allclose(one, other, rtol=0.0, atol=_rounding(one), equal_nan=True)  # of the largest value
        for one, other in pairs
    )


def _rounding(tensor: Tensor) -> float:
    largest = tensor.nan_to_num(posinf=0.0, neginf=0.0).abs().max().item()
    return float(_TOLERANCE * torch.finfo(tensor.dtype).eps * max(largest, torch.finfo(tensor.dtype).tiny))
