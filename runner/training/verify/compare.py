"""Compares the recorded tensors of two runs: are they equal, and where do they first differ?

Losses, gradients and weights are compared. Gradients are included because an optimizer may hide an error in them: Adam
makes the same step for any multiple of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from runner.record import read_steps
from runner.training.verify.recorded_tensors import read_tensors

__all__ = ["Comparison", "Difference", "Promise", "compare_runs"]

Promise = Literal["bitwise", "rounding"]

_RELATIVE = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_OF_LARGEST_GRADIENT = 1e-3
_NOISE = 1e-3
"""Share of a step's largest gradient. Sums in another order differ by some 1e-6 of it in fp32, which is a thousandth of
an entry so large: a weight that was zero, and that Adam moves by its rate a step, differs as much."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs.

    Args:
        step: the first step that differs, counted from 1.
        quantity: what differs: ``gradient``, ``weight``, or ``loss`` if only the loss does.
        parameter: the first one in the order of the model; None for a loss.
    """

    step: int
    quantity: str
    parameter: str | None


@dataclass(frozen=True)
class Comparison:
    """The comparison of a layout with one process.

    Args:
        equal: whether they are as equal as promised, ``of_parts``, too.
        bitwise: whether they have the same bits.
        promise: what the layout must fulfil: the same bits, or the same up to the order of sums.
        steps: number of optimizer steps compared.
        loss, gradients, weights: largest absolute differences.
        first_difference: None if the runs are equal.
        parameters, trained_parameters: how many the model has, and how many of them are trained.
        of_parts: the comparison with a plain loop over the same parts of divided layers, which has the same bits; None
            if there are none, or if their sums have no order.
    """

    equal: bool
    bitwise: bool
    promise: Promise
    steps: int
    loss: float
    gradients: float
    weights: float
    first_difference: Difference | None
    parameters: int = 0
    trained_parameters: int = 0
    of_parts: Comparison | None = None

    def to_json(self) -> dict[str, Any]:
        """The document of ``runner verify --json``."""
        first = self.first_difference
        of_parts = {} if self.of_parts is None else {"of_parts": self.of_parts.to_json()}
        return of_parts | {
            "equal": self.equal,
            "bitwise": self.bitwise,
            "promise": self.promise,
            "steps": self.steps,
            "max_abs_difference": {"loss": self.loss, "weights": self.weights, "gradients": self.gradients},
            "first_difference": None
            if first is None
            else {"step": first.step, "parameter": first.parameter, "quantity": first.quantity},
            "parameters": self.parameters,
            "trained_parameters": self.trained_parameters,
        }


def compare_runs(layout: Path, reference: Path, promise: Promise, *, with_gradients: bool = True) -> Comparison:
    """Compare the recorded tensors in two run directories.

    Gradients are left out where none can be seen: with ZeRO, replicas shard them; with post-validation, an update may
    have been taken back to clip them.

    With ``rounding``, a gradient may differ by a small part of the largest entry of its tensor plus a smaller part of
    the largest of the model. A weight may differ likewise, but only entries whose gradient is more than noise count,
    because the rounding error of a zero gradient becomes a complete step of Adam.
    """
    losses = _losses(layout), _losses(reference)
    state = _State(promise, with_gradients)
    for step, (own, theirs) in enumerate(zip(*losses, strict=True), 1):
        state.compare_loss(step, own, theirs)
        ranks = read_tensors(layout, step)
        if ranks:
            (expected,) = read_tensors(reference, step)
            state.compare_tensors(step, ranks, expected)
    return Comparison(
        equal=state.first is None,
        bitwise=state.bitwise,
        promise=promise,
        steps=len(losses[0]),
        loss=state.largest["loss"],
        gradients=state.largest["gradient"],
        weights=state.largest["weight"],
        first_difference=state.first,
    )


class _State:
    """What the comparison has found so far."""

    def __init__(self, promise: Promise, with_gradients: bool) -> None:
        self.promise = promise
        self._with_gradients = with_gradients
        self.bitwise = True
        self.first: Difference | None = None
        self.largest = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
        self._clear: dict[str, Tensor] = {}  # parameter -> elements whose gradients were always larger than noise

    def compare_loss(self, step: int, own: float, expected: float) -> None:
        if math.isnan(own) and math.isnan(expected):  # both skip the step, or end at it
            return
        self.bitwise &= own == expected
        self.largest["loss"] = max(self.largest["loss"], abs(own - expected))
        limit = 0.0 if self.promise == "bitwise" else 1e-4 * abs(expected)
        if not abs(own - expected) <= limit:
            self._differs(step, "loss", None)

    def compare_tensors(self, step: int, ranks: Sequence[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
        gradients = {name: tensor for name, tensor in expected.items() if name.startswith("gradient/")}
        peak = max((float(tensor.abs().max()) for tensor in gradients.values() if tensor.numel()), default=0.0)
        for name, tensor in gradients.items():
            parameter = name.partition("/")[2]
            clear = tensor.abs() > _NOISE * peak
            self._clear[parameter] = self._clear[parameter] & clear if parameter in self._clear else clear
        compared = list(gradients) if self._with_gradients else []
        for name in [*compared, *(name for name in expected if name not in gradients)]:
            found = [rank[name] for rank in ranks if name in rank]
            quantity, _, parameter = name.partition("/")
            if not found:
                self.bitwise = False
                self._differs(step, quantity, parameter)
            for tensor in found:
                self._compare(step, quantity, parameter, tensor, expected[name], peak)

    def _compare(self, step: int, quantity: str, parameter: str, own: Tensor, expected: Tensor, peak: float) -> None:
        if own.shape == expected.shape and torch.equal(own, expected):
            return
        self.bitwise = False
        if own.shape != expected.shape:
            self._differs(step, quantity, parameter)
            return
        distance = (_wide(own) - _wide(expected)).abs()
        self.largest[quantity] = max(self.largest[quantity], float(distance.nan_to_num(torch.inf).max()))
        if self.promise == "bitwise" or not self._within(quantity, parameter, distance, expected, peak):
            self._differs(step, quantity, parameter)

    def _within(self, quantity: str, parameter: str, distance: Tensor, expected: Tensor, peak: float) -> bool:
        scale = float(expected.abs().max())
        if quantity == "gradient":
            scale += _OF_LARGEST_GRADIENT * peak
        elif parameter in self._clear:
            distance = torch.where(self._clear[parameter], distance, torch.zeros_like(distance))
        return bool((distance <= _RELATIVE.get(expected.dtype, 0.0) * scale).all())

    def _differs(self, step: int, quantity: str, parameter: str | None) -> None:
        """Keep the difference of the first step; within a step, a parameter tells more than the loss."""
        if self.first is None or (self.first.step == step and self.first.parameter is None):
            self.first = Difference(step, quantity, parameter)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _losses(run_dir: Path) -> list[float]:
    return [float(line["loss"]) for line in read_steps(run_dir)]
