"""What ``runner verify`` says of a difference."""

from __future__ import annotations

from typing import Any

import pytest

from runner.cli.main import main
from runner.training.verify.compare import Comparison, Difference, Promise

_HINT = "precision=fp64 tells it from a mistake"


@pytest.mark.parametrize(
    ("promise", "step", "quantity", "more", "is_told"),
    [
        ("rounding", 2, "gradient", (), True),
        ("rounding", 1, "gradient", (), False),
        ("rounding", 1, "weight", (), True),  # what an optimizer made of equal gradients
        ("bitwise", 2, "gradient", (), False),
        ("rounding", 2, "gradient", ("precision=fp64",), False),
    ],
)
def test_a_later_difference_may_be_rounding(
    promise: Promise,
    step: int,
    quantity: str,
    more: tuple[str, ...],
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def different(config: Any, steps: int) -> Comparison:
        return Comparison(False, False, promise, steps, 1e-6, 1e-6, 1e-4, Difference(step, quantity, "0.weight"))

    monkeypatch.setattr("runner.launch.verify.verify", different)
    assert main(["verify", "model=mlp", *more]) == 4
    text = capsys.readouterr().out
    assert text.startswith(f"different from step {step} on, first the {quantity} of 0.weight;")
    assert (_HINT in text) == is_told
