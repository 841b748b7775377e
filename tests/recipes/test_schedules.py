"""The schedules' recipe: every row on paper, its tables and figures, and small measurements."""

from __future__ import annotations

import copy
import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.recipes.schedules import measured, memory, peers
from runner.recipes.schedules.__main__ import document, write
from runner.recipes.schedules.computed import compute
from runner.recipes.schedules.figures import FIGURES, draw
from runner.recipes.schedules.rows import ROWS, Row
from runner.recipes.schedules.tables import markdown, replace_block, to_csv
from runner.schedule.catalogue.registry import SPECS, build
from runner.schedule.simulation.clock import Costs, simulate
from runner.schedule.steady import period


@pytest.mark.costly
def test_variants_have_their_own_closed_forms() -> None:
    idle = {row.variant: row for row in ROWS if row.schedule == "chimera"}
    assert compute(idle["doubling"], 4, 16).formula == pytest.approx(2 / 26)
    assert compute(idle["halving"], 4, 16).formula == pytest.approx(2 / 50)
    whole, half, double = (memory.predict(idle[name], 4, 16) for name in (None, "halving", "doubling"))
    assert half["share"] == pytest.approx(whole["share"], rel=1e-4)  # a scalar for each half's loss
    assert double["simulated"] == [2 * count for count in whole["simulated"]]


def row(name: str, chunks: int | None = None) -> Row:
    return next(row for row in ROWS if row.schedule == name and chunks in (None, row.chunks))


def test_every_schedule_of_this_kind_is_a_row() -> None:
    flushed = {name for name, spec in SPECS.items() if not spec.by_plan and spec.kind == "synchronous"}
    ours = flushed - {"from_file", "pipefisher"}
    assert {row.schedule for row in ROWS} == ours, "a new schedule is a row of recipes/schedules/rows.py"


def test_a_row_without_its_condition_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="the row fifo, v = 2 must have its condition, which the table prints"):
        Row("fifo", 2)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_the_simulation_agrees_with_the_closed_form(row: Row) -> None:
    known = compute(row, 4, 16)
    assert (known.formula is None) == (SPECS[row.schedule].formulas is None)
    if known.formula is not None:
        assert known.simulated == pytest.approx(known.formula)
        assert known.simulated_activations == pytest.approx(known.formula_activations)
    assert known.simulated_in_a_row <= known.simulated + 1e-9


def test_what_the_specification_prints_for_four_ranks_and_eight_microbatches() -> None:
    printed = {"naive": 0.75, "gpipe": 0.273, "interleaved_1f1b": 0.158, "zb_h1": 0.111, "zb_v": 0.059, "v_half": 0.2}
    for name, ratio in printed.items():
        assert compute(row(name), 4, 8).simulated == pytest.approx(ratio, abs=5e-4)
    assert compute(row("zb_h2"), 4, 8).simulated_in_a_row == pytest.approx(0)
    assert compute(row("zb_h1"), 4, 8).simulated_in_a_row == pytest.approx(1 / 9)


def test_a_formula_stands_only_where_its_condition_holds() -> None:
    assert compute(row("zb_v"), 4, 6).formula is None
    assert compute(row("zb_v"), 4, 7).formula is not None


@pytest.mark.costly
def test_the_predicted_bytes_are_the_formulas_and_what_is_under_way() -> None:
    one = memory.predict(row("1f1b"), 4, 16)
    assert one["formula"] == [count * share for count, share in zip((4, 3, 2, 1), one["share"], strict=True)]
    for part, formula, share in zip(one["predicted"], one["formula"], one["share"], strict=True):
        assert part["weights"] == one["formula_weights"]
        assert formula < part["activations"] < formula + share / 2
    whole, half = (memory.predict(row(name), 4, 16)["predicted"] for name in ("zb_v", "v_half"))
    assert sum(rank["activations"] for rank in half) < 0.8 * sum(rank["activations"] for rank in whole)


@pytest.fixture(scope="module")
def computed() -> dict[str, Any]:
    return document(ranks=[4], microbatches=8, seconds=0.02, rounds=1, measures=False)


@pytest.mark.costly
def test_tables_figures_and_files(computed: dict[str, Any], tmp_path: Path) -> None:
    content = computed
    write(content, tmp_path)
    assert json.loads((tmp_path / "schedules.json").read_text(encoding="utf-8")) == json.loads(json.dumps(content))
    assert {"date", "hardware", "versions", "commit", "settings"} <= content.keys()
    lines = list(csv.DictReader(io.StringIO(to_csv(content))))
    assert [line["schedule"] for line in lines] == [row.label for row in ROWS]
    assert float(lines[1]["bubble_simulated"]) == pytest.approx(3 / 11)
    text = markdown(content)
    assert "| gpipe | (D-1)/(T+D-1) | 0.273 | 0.273 |  | 0.273 |  |" in text
    assert "idle / ideal, unlike the other rows" in text
    assert all(f"- `{row.label}`: " in text for row in ROWS)


@pytest.mark.costly
def test_each_tick_of_the_survey_has_its_verdict(computed: dict[str, Any]) -> None:
    content = copy.deepcopy(computed)
    for line in content["memory"]:
        line["measured"] = [{"weights": 10, "activations": 1, "flops": 7, "sent": 100}] * 4
    by_name = {line["label"]: line for line in content["memory"]}
    by_name["gems"]["measured"] = [{"weights": 20, "activations": 1, "flops": 7, "sent": 130}] * 4
    text = markdown(content)
    assert "| gpipe | 1.000 | no: confirmed | 1.000 | no: confirmed | 1.000 | no: confirmed |" in text
    assert "| gems | 2.000 | yes: confirmed | 1.000 | no: confirmed | 1.300 | yes: confirmed |" in text
    assert "| zb_h2 | 1.000 | no: confirmed | 1.000 | yes: not decided here | 1.000 | no: confirmed |" in text
    assert "| zb_h1 | 1.000 |  | 1.000 |  | 1.000 |  |" in text
    assert {line["label"] for line in content["memory"] if line["ticks"]} == {row.label for row in ROWS if row.ticks}


def test_figures_show_their_schedules(tmp_path: Path) -> None:
    for path, panels in zip(draw(tmp_path), FIGURES.values(), strict=True):
        texts = {text.text or "" for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}
        assert all(any(text.startswith(panel.schedule) for text in texts) for panel in panels)


def test_the_surveys_figures_have_its_sizes() -> None:
    """Guan et al. 2024: naive on three ranks, GPipe on four with four micro-batches, PipeDream."""
    found = {name: [(one.schedule, one.ranks, one.microbatches) for one in FIGURES[name]] for name in list(FIGURES)[:3]}
    assert found == {
        "survey-1": [("naive", 3, 1)],
        "survey-2": [("gpipe", 4, 4)],
        "survey-3": [("pipedream", 4, 4)],
    }


def test_a_block_of_the_readme_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("above\n<!-- tables -->\nold\n<!-- /tables -->\nbelow\n", encoding="utf-8")
    for content in ("first", "second"):
        replace_block(readme, "tables", content)
        expected = f"above\n<!-- tables -->\n\n{content}\n\n<!-- /tables -->\nbelow\n"
        assert readme.read_text(encoding="utf-8") == expected
    with pytest.raises(ValueError, match="no lines <!-- peers -->"):
        replace_block(readme, "peers", "")


def test_the_peers_table() -> None:
    taken = {"1f1b": [3.3, 3.4], "Schedule1F1B": [3.6, 3.4]}
    pair = peers.Pair("1f1b", "Schedule1F1B")
    text = peers.markdown(taken, [pair], ranks=4, microbatches=8, seconds=0.1)
    assert text.splitlines()[-1] == "| 1f1b | 1 | 0.375 | 0.396 | Schedule1F1B | 0.458 | 0.958 |"
    text = peers.markdown(taken, [pair], ranks=4, microbatches=8, seconds=None)
    assert text.splitlines()[-1] == "| 1f1b | 1 | 0.375 | 3.350 | Schedule1F1B | 3.500 | 0.958 |"


class Counted:
    """Stands for a pipeline and its engine; it notes its steps and where its steps in a row end."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.engine, self._name, self._calls = self, name, calls

    def step(self, batch: object) -> None:
        self._calls.append(self._name)

    def drain(self) -> None:
        self._calls.append("drained")


def test_steps_in_a_row_take_their_turns_among_the_others() -> None:
    """If they were measured once, at the end, what slows the machine down in that time would be theirs alone."""
    calls: list[str] = []
    nothing = torch.zeros(1), torch.zeros(1)
    flushed: dict[str, Any] = {"one": Counted("one", calls)}
    without: dict[str, Any] = {"row": Counted("row", calls)}
    taken = measured.in_turns(flushed, without, nothing, rounds=3, meet=lambda: None)
    assert calls == ["one", *["row"] * measured.STEPS_IN_A_ROW, "drained"] * 3
    assert {name: len(seconds) for name, seconds in taken.items()} == {"one": 3, "row": 3}


@pytest.mark.parametrize("message", [0.0, 0.2])
def test_zb_v_in_a_row_is_shorter_than_flushed_whatever_a_message_takes(message: float) -> None:
    """So a measurement that says otherwise is one of the machine, and not of the order."""
    schedule, costs = build("zb_v", 4, 16), Costs(F=1.0, B=2.0, I=1.0, W=1.0, comm=message)
    assert period(schedule, costs) < simulate(schedule, costs).makespan
