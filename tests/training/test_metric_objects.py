"""Metrics that a LightningModule logs as objects reach the lines, the record and the report."""

from __future__ import annotations

from typing import Any, cast

import torch
from torchmetrics import MeanAbsoluteError, Metric

from runner.strategy.pipeline import EngineStrategy
from runner.training.validation import LoggedFigures


class _Ranks:
    """What two ranks say: this one, and another that has logged these names."""

    replica = 0

    def __init__(self, *names: str) -> None:
        self._names = names

    def all_gather_objects(self, own: Any) -> list[Any]:
        return [own, list(self._names)] if isinstance(own, list) else [own]


def _logged(*names: str) -> tuple[dict[str, float], list[str]]:
    shown: list[str] = []
    figures = LoggedFigures(lambda name, value, **how: shown.append(name))
    error: Metric = MeanAbsoluteError()
    for given in (1.0, 2.0, 6.0):
        error.update(torch.tensor([given]), torch.tensor([0.0]))
        figures.log(1, "val_error", error)
        figures.log(1, "val_loss", torch.tensor(given))
    return figures.means(cast(EngineStrategy, _Ranks(*names))), shown


def test_a_metric_object_gives_what_it_computes_over_the_set() -> None:
    means, shown = _logged("val_error")
    assert means == {"val_loss": 3.0, "val_error": 3.0}
    assert shown.count("val_error") == 3, "Lightning has it, too, and resets it"


def test_one_that_not_all_ranks_have_logged_is_left_to_lightning() -> None:
    """It would wait for ranks that do not come."""
    assert _logged()[0] == {"val_loss": 3.0}
