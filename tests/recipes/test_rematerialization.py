"""The recipe of activation-checkpoint strategies: its models, measurements, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.recipes.rematerialization import solvers
from runner.recipes.rematerialization.figures import draw
from runner.recipes.rematerialization.measure import STRATEGIES, measure
from runner.recipes.rematerialization.models import MODELS, Task
from runner.recipes.rematerialization.tables import markdown
from runner.zoo import gpt

SCALARS = 64  # bytes of scalars beside the loss and its gradient


def check(
    task: Task, budgets: int, strategies: tuple[str, ...], budgeted: tuple[str, ...] = ("rotor", "auto")
) -> Mapping[str, Any]:
    """Measure a model, which fails by itself if bits differ; compare with the prediction."""
    found = measure(task, {each: STRATEGIES[each] for each in strategies}, budgets, budgeted)
    chosen = {name: [row for row in rows if "measured_bytes" in row] for name, rows in found["budgets"].items()}
    for row in (*found["strategies"].values(), *(row for rows in chosen.values() for row in rows)):
        assert 0.99 * row["predicted_bytes"] <= row["measured_bytes"] <= row["predicted_bytes"] + SCALARS
        assert row["predicted_flops"] == pytest.approx(row["measured_flops"], rel=0.01)
        assert row["predicted_forwards"] == row["measured_forwards"]
    for rows in chosen.values():
        assert all(row["measured_bytes"] <= row["budget"] for row in rows)
        assert all(less["measured_bytes"] <= more["measured_bytes"] for more, less in pairwise(rows))
        assert [row["measured_flops"] for row in rows] == sorted(row["measured_flops"] for row in rows)
        assert len(rows) >= budgets // 4
    return found


def small_task() -> Task:
    """A GPT of six blocks, whose step takes some milliseconds."""
    generator = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(32, (8, 16), generator=generator) for _ in range(2))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    return Task(lambda: gpt.build(32, 16, 32, 6, 2, 0.1), (ids, targets), loss)


@pytest.mark.costly
def test_a_second_run_waits_until_the_backward_asks_for_a_saved_tensor() -> None:
    """The model's last layer has parts of a bias, whose gradients are made before."""
    check(MODELS["ruDALL-E"](), 0, ("periodic every=4",), ())


def normalizing_task() -> Task:
    """Layers whose running statistics weigh as much as their activations."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(4, 48, generator=generator), torch.randint(48, (4,), generator=generator)

    def build() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Tanh()) for _ in range(8)))

    return Task(build, (inputs, targets), nn.functional.cross_entropy)


def test_copies_of_running_statistics_are_predicted() -> None:
    """Also where parts are nested: each keeps what its own second run begins with."""
    check(normalizing_task(), 4, ("full", "chen_recursive cuts=2", "bisect"))


@pytest.mark.costly
def test_bytes_forwards_and_flops_are_those_predicted(tmp_path: Path) -> None:
    found = check(small_task(), 4, ("full", "bisect"))
    document = {"machine": "a machine", "torch": "2", "date": "today", "models": {"GPT": found}}
    text = markdown(document)
    assert "### GPT: " in text
    assert "| `bisect` | " in text
    assert "| strategy | 1.00 | 0.75 | 0.50 | 0.25 | least possible |" in text
    assert text.count("| `rotor` | ") == text.count("| `auto` | ") == 2
    assert "time, measured" not in text
    (path,) = draw(document, tmp_path)
    assert f"figures/{path.name}" in text
    assert path.stat().st_size > 1000


@pytest.mark.costly
def test_strategies_of_graphs_and_time_are_shown_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.recipes.rematerialization.measure.STEP_SECONDS", 0.1)
    budgeted = ("rockmate", "kusumoto", "kusumoto approximate", "checkmate", "treewidth", "dtr lru")
    found = measure(normalizing_task(), {"full": STRATEGIES["full"]}, 2, budgeted, timed=True)
    text = markdown({"machine": "a machine", "torch": "2", "date": "today", "models": {"norms": found}})
    assert "| FLOPs, predicted | counted | time, measured |" in text
    assert "Time as measured, as parts of the plain step's predicted one." in text
    assert all(text.count(f"| `{name}` | ") == 3 for name in budgeted)
    rows = [(name, row) for name, each in found["budgets"].items() for row in each if "measured_bytes" in row]
    assert all("measured_seconds" in row for _, row in rows)
    assert all(row["measured_bytes"] <= row["predicted_bytes"] for _, row in rows)


@pytest.mark.costly
def test_weights_that_all_steps_share_are_predicted_and_a_strategy_that_refuses_them_is_told() -> None:
    found = check(MODELS["LSTM"](), 4, ("full",), ("coop",))
    assert found["budgets"] == {}
    document = {"machine": "a machine", "torch": "2", "date": "today", "models": {"LSTM": found}}
    assert "`activation_checkpoint=coop` is refused: " in markdown(document)


def test_costs_of_graph_solvers_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert solvers.main(["--sizes", "8", "--graphs", "1"]) == 0
    text = capsys.readouterr().out
    assert "| 8 | 0.75 | " in text
    assert "| 0 | 12 | 0.8 | " in text
