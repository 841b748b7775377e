"""The comparison of recorded tensors: what counts as equal, and what is named first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.record import StepLog
from runner.training.verify.compare import Comparison, Difference, compare_runs
from runner.training.verify.recorded_tensors import write_tensors

NAMES = ("0.weight", "0.bias", "2.weight")  # no alphabet's order


def tensors(step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and weights of a step; the bias has a gradient of rounding noise."""
    generator = torch.Generator().manual_seed(step)
    gradients = {name: torch.randn(4, 3, generator=generator) for name in NAMES}
    gradients["0.bias"] = gradients["0.bias"] * 1e-9
    return gradients, {name: torch.randn(4, 3, generator=generator) for name in NAMES}


def run(
    place: Path,
    *,
    ranks: int = 1,
    losses: tuple[float, ...] = (2.0, 1.5),
    changes: tuple[tuple[int, str, str, float], ...] = (),
) -> Path:
    """A directory with the recorded tensors of two steps, dealt to ranks; ``changes`` add to (step, quantity, name)."""
    place.mkdir()
    with StepLog(place) as log:
        for step, loss in enumerate(losses, 1):
            log.write(step=step, loss=loss, seconds=0.0)
            quantities = dict(zip(("gradient", "weight"), tensors(step), strict=True))
            for at, quantity, name, amount in changes:
                if at == step:
                    quantities[quantity][name] = quantities[quantity][name] + amount
            for rank in range(ranks):
                own = NAMES[rank::ranks]
                parts = [{name: quantities[kind][name] for name in own} for kind in ("gradient", "weight")]
                write_tensors(place, step, rank, *parts)
    return place


def compared(tmp_path: Path, promise: str = "bitwise", **changed: Any) -> Comparison:
    layout, reference = run(tmp_path / "layout", ranks=2, **changed), run(tmp_path / "reference")
    return compare_runs(layout, reference, promise)  # type: ignore[arg-type]


def test_the_same_bits(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found.to_json() == {
        "equal": True,
        "bitwise": True,
        "promise": "bitwise",
        "steps": 2,
        "max_abs_difference": {"loss": 0.0, "weights": 0.0, "gradients": 0.0},
        "first_difference": None,
        "parameters": 0,  # nobody has counted any
        "trained_parameters": 0,
    }


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ((2, "gradient", "2.weight", 1e-6), Difference(2, "gradient", "2.weight")),
        ((1, "weight", "0.weight", 1e-6), Difference(1, "weight", "0.weight")),
        ((2, "weight", "0.bias", 0.1), Difference(2, "weight", "0.bias")),
        ((2, "weight", "2.weight", float("nan")), Difference(2, "weight", "2.weight")),
    ],
)
def test_any_other_bit_where_bits_are_promised(
    tmp_path: Path, change: tuple[int, str, str, float], first: Difference
) -> None:
    found = compared(tmp_path, changes=(change,))
    assert not found.equal
    assert not found.bitwise
    assert found.first_difference == first


def test_the_first_step_is_named_and_of_it_a_parameter_rather_than_the_loss(tmp_path: Path) -> None:
    changes = ((2, "gradient", "0.weight", 1.0), (1, "weight", "2.weight", 1.0), (1, "gradient", "2.weight", 0.5))
    found = compared(tmp_path, losses=(2.5, 1.5), changes=changes)
    assert found.first_difference == Difference(1, "gradient", "2.weight")
    assert found.loss == 0.5
    assert found.weights == pytest.approx(1.0)


def test_a_loss_that_differs_alone(tmp_path: Path) -> None:
    found = compared(tmp_path, losses=(2.0, 1.6))
    assert found.first_difference == Difference(2, "loss", None)


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ((1, "gradient", "0.weight", 1e-6), True),
        ((1, "gradient", "0.weight", 1e-2), False),
        ((1, "gradient", "0.bias", 1e-9), True),  # as large as itself, and nothing beside the others
        ((1, "weight", "0.weight", 1e-6), True),
        ((2, "weight", "0.weight", 1e-2), False),
        ((2, "weight", "0.bias", 2e-3), True),  # Adam makes a whole step of noise
    ],
)
def test_rounding_where_sums_have_no_order(tmp_path: Path, change: tuple[int, str, str, float], equal: bool) -> None:
    found = compared(tmp_path, "rounding", changes=(change,))
    assert found.equal is equal
    assert not found.bitwise
    assert (found.first_difference is None) is equal


def test_a_tensor_that_no_rank_has(tmp_path: Path) -> None:
    layout, reference = run(tmp_path / "layout", ranks=2), run(tmp_path / "reference")
    for path in layout.glob("recorded/step-1/rank-1.safetensors"):
        path.unlink()
    found = compare_runs(layout, reference, "rounding")
    assert found.first_difference == Difference(1, "gradient", "0.bias")


def test_parameters_have_the_order_of_the_model(tmp_path: Path) -> None:
    changes = tuple((2, "weight", name, 1.0) for name in NAMES)
    assert compared(tmp_path, changes=changes).first_difference == Difference(2, "weight", "0.weight")
