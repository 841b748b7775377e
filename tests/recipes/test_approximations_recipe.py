"""The tables of a factorial sweep: effects and interactions against the values from which they were made."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from runner.recipes.approximations.factorial import FACTORS, contrasts, sweep_report

SAVED = dict(zip(FACTORS, (100, 200, 300, 400), strict=True))
TOGETHER = 50  # that few bits and random rows lose beside each other


def _subsets() -> list[frozenset[str]]:
    return [frozenset(names) for size in range(len(FACTORS) + 1) for names in combinations(FACTORS, size)]


def _peak(factors: frozenset[str]) -> int:
    clash = TOGETHER if set(FACTORS[:2]) <= factors else 0
    return 9000 - sum(SAVED[each] for each in factors) + clash


def _run(factors: frozenset[str]) -> dict[str, Any]:
    bits, rows, train, states = (each in factors for each in FACTORS)
    backward = "both" if bits and rows else "fewbit" if bits else "randomized_linear" if rows else "none"
    config = {
        "approximate_backward": {"name": backward},
        "embedding": {"name": "tensor_train" if train else "dense"},
        "optimizer": {"name": "adam8bit" if states else "adamw"},
    }
    peak = _peak(factors)
    record = {
        "status": "ok", "config": config, "peak_memory_bytes": {"predicted": [peak + 1], "measured": [peak]},
        "loss": [3.0, 1.0 + len(factors)], "val_loss": [],
    }  # fmt: skip
    return {"directory": "", "record": record}


def test_additive_values_have_no_interactions_and_others_have_theirs() -> None:
    found = dict(contrasts({factors: -_peak(factors) for factors in _subsets()}))
    first, second = FACTORS[:2]
    for name, saved in SAVED.items():
        lost = TOGETHER / 2 if name in (first, second) else 0
        assert found[name] == pytest.approx(saved - lost)
    for names in combinations(FACTORS, 2):
        assert found[" x ".join(names)] == pytest.approx(-TOGETHER / 2 if names == (first, second) else 0)


def test_the_tables_read_records() -> None:
    table, effects = sweep_report([_run(factors) for factors in _subsets()])["tables"]
    rows = {row[0]: row for row in table["values"]}
    assert len(rows) == 16
    assert rows["none"][1:4] == (9001, 9000, 0)
    assert rows["few bits + tensor train"][3:6] == (400, 1.0, 3.0)
    assert rows["few bits + randomized linear"][3] == 250
    assert rows["few bits + randomized linear"][4] == pytest.approx(250 / 300)
    assert {row[0]: row[1] for row in effects["values"]}["8-bit Adam"] == pytest.approx(0.5)


def test_a_sweep_that_is_not_complete_has_no_effects() -> None:
    runs = [_run(frozenset()), _run(frozenset({"tensor train"}))]
    runs[1]["record"]["status"] = "failed"
    (table,) = sweep_report(runs)["tables"]
    assert [row[0] for row in table["rows"]] == ["none"]
    assert ": failed" in table["notes"]
