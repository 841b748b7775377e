"""The recipe for one GPU is ready: its requests are legal, and its tables say what records say. No GPU is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.recipes.gpu import __main__ as recipe
from runner.recipes.gpu.runs import PARTS, malevich
from runner.recipes.gpu.tables import Row, memory_figure, row_of, tables
from runner.record import RunRecord

RUNS = {f"{part} {name}": words for part, one in PARTS.items() for name, words in one.runs.items()}


@pytest.mark.costly
@pytest.mark.parametrize("name", [*RUNS, "malevich"])
def test_every_request_is_legal_on_a_gpu(name: str) -> None:
    words = [word for word in RUNS.get(name, malevich(8)) if word != "hardware=auto"]  # there is no GPU to ask
    config = resolve([*words, "device=cuda", "hardware=a100_80gb", "run_dir=run"])
    assert [problem.line() for problem in rules(config)] == []


def test_a_row_is_what_the_record_says(tmp_path: Path) -> None:
    RunRecord(
        status="ok",
        loss=[3.0, 2.0],
        step_seconds={"all": [0.1], "median": 0.1, "predicted": 0.2},
        bubble_ratio={"predicted": 0.25, "measured": 0.5},
        peak_memory_bytes={"predicted": [1000, 3000], "measured": [2000, 1000], "kind": "cuda_allocated"},
        extras={"reserved_bytes": {"measured": [4000, 3000]}},
    ).save(tmp_path)
    row = row_of("x", tmp_path, reason="")
    assert (row.allocated, row.predicted_allocated, row.reserved) == (2000, 3000, 4000)
    assert (row.seconds, row.predicted_seconds, row.bubble, row.loss) == (0.1, 0.2, 0.5, 2.0)
    failed = row_of("y", tmp_path / "nothing", reason="it said why | so")
    text = tables({"precision": [row, failed], "shared": []}, "Fake GPU")
    assert "| x | 0.1000 | 0.2000 | 0.000 |" in text
    assert "| y | failed: it said why \\| so |" in text
    memory_figure({"precision": [row, failed]}, tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").stat().st_size > 1000


def test_no_run_begins_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = recipe.Session(tmp_path, "cpu", seconds=0.0)
    assert session.train("precision", "x", []) == Row("x", status="left out", reason="the time was up")

    def slow(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("runner", 1.0)

    monkeypatch.setattr(subprocess, "run", slow)
    assert recipe.Session(tmp_path, "cpu").train("precision", "x", []).status == "cut"


def test_as_many_layers_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(self: recipe.Session, words: list[str]) -> dict[str, Any] | None:
        layers = next(int(word.partition("=")[2]) for word in words if word.startswith("model.kwargs.layers="))
        return {"fits": layers <= 12} if layers < 24 else None

    monkeypatch.setattr(recipe.Session, "plan", plan)
    assert recipe.most_layers(recipe.Session(tmp_path, "cpu")) == 12
