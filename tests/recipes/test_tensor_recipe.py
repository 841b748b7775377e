"""The recipe of divided layers: its formula against the plan of a request, and its pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runner.config.compose.resolve import resolve
from runner.plan.make import make_plan
from runner.profiling.model import profile_model
from runner.recipes.tensor.__main__ import markdown
from runner.recipes.tensor.counted import Layout, Size, formula_bytes, words
from runner.recipes.tensor.figures import draw
from runner.recipes.tensor.kept import counted as kept_bytes
from runner.recipes.tensor.kept import formula_bytes as kept_by_formula
from runner.recipes.tensor.kernels import compare
from runner.recipes.tensor.kernels import markdown as of_kernels
from runner.recipes.tensor.peers import compare as compare_peers
from runner.recipes.tensor.stages import Grid, formulas, grid_words, grids
from runner.recipes.tensor.trick import WAYS, planned
from runner.recipes.tensor.trick import Size as ImageSize
from runner.recipes.tensor.trick import formula_bytes as sent_by_formula

SMALL = Size(layers=1, width=8, sequence_length=6, vocab_size=10, heads=2, samples=2)


@pytest.mark.costly
@pytest.mark.parametrize("layout", [Layout(2), Layout(2, sequence=True)], ids=lambda each: each.name)
def test_the_formula_is_what_the_plan_counts_operator_by_operator(layout: Layout) -> None:
    config = resolve([*words(SMALL, layout), "hardware=laptop_cpu"])
    assert make_plan(config, profile_model(config)).tensor_bytes_sent == formula_bytes(SMALL, layout)


@pytest.mark.costly
@pytest.mark.parametrize("grid", list(grids()), ids=lambda each: each.name)
def test_stages_and_replicas_send_what_plans_count(grid: Grid) -> None:
    size = replace(SMALL, layers=2, width=16, heads=4, sequence_length=8, vocab_size=12, samples=8)
    config = resolve([*grid_words(size, grid), "hardware=laptop_cpu"])
    plan = make_plan(config, profile_model(config))
    assert plan.tensor_bytes_sent == formulas(size, grid)["parts"]
    assert plan.gradient_bytes_sent == formulas(size, grid)["replicas"]


@pytest.mark.costly
def test_eager_operators_keep_what_fused_ones_do_not() -> None:
    """A number for each pair of tokens and head, instead of one for each token and head: the sum of exponentials."""
    size = replace(SMALL, layers=1, width=16, heads=4, sequence_length=8, samples=3)
    means = ("none", "attention eager", "attention fused", "norm fused", "elementwise fused")
    rows = {row["kernels"]: row for row in compare(size, rounds=1, means=means)}
    assert max(row["off"] for row in rows.values()) < 1e-5
    plain, tokens = rows["none"]["saved"], 4 * 3 * 8
    assert plain == rows["attention fused"]["saved"]
    assert rows["attention eager"]["saved"] - plain == 4 * 3 * 4 * (8 * 8 - 8)
    assert plain - rows["norm fused"]["saved"] == 2 * tokens * (16 + 1)  # what is scaled, and its divisor
    assert plain - rows["elementwise fused"]["saved"] == tokens * 3 * 16  # silu of the gate
    assert "| norm fused |" in of_kernels(list(rows.values()))


@pytest.mark.costly
@pytest.mark.parametrize("layout", [Layout(2), Layout(4, sequence=True)], ids=lambda each: each.name)
def test_a_block_keeps_what_the_published_terms_say(layout: Layout) -> None:
    assert kept_bytes(layout) == kept_by_formula(layout)


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
def test_an_alexnet_sends_what_the_formula_says(way: str) -> None:
    size = ImageSize(scale=32, side=96, samples=4)
    assert planned(size, way) == sent_by_formula(size, way)


@pytest.mark.costly
def test_other_ways_of_dividing_layers_have_the_same_gradients() -> None:
    rows = compare_peers(2, width=64, layers=1, samples=1, tokens=4, rounds=1)
    assert [row["contestant"] for row in rows][:4] == ["whole", "runner", "DTensor", "AutoTP"]
    assert max(row["off"] for row in rows if row["off"] is not None) < 1e-5


def test_a_block_sums_twice_in_each_pass() -> None:
    """Two ranks of a sum of n bytes send n each; here an activation has 2 x 6 x 8 numbers."""
    activation, numbers = 2 * 6 * 8 * 4, 2 * 6 * 4
    assert formula_bytes(SMALL, Layout(2)) == 2 * (2 * 3 * activation + 3 * numbers)
    more = formula_bytes(Size(layers=2, width=8, sequence_length=6, samples=2), Layout(2))
    assert more - formula_bytes(SMALL, Layout(2)) == 2 * 4 * activation


def test_pages_are_made_of_rows(tmp_path: Path) -> None:
    row = {"layout": "tensor 2", "sent": 10.0, "formula": 10.0, "peak": 5, "planned": 6, "loss": 1.0}
    peer = {"width": 8, "samples": 1, "tokens": 2, "contestant": "runner"}
    peer |= {"milliseconds": 1.25, "wall_milliseconds": 2.5, "off": 1e-7}
    text = markdown({"rows": [row], "peers": [peer]})
    assert "| tensor 2 | 10 | 10 | 5 | 6 | 1.00000 |" in text
    assert "| 8 | 1 x 2 | runner | 1.2 ms | 2.5 ms | 1e-07 |" in text
    assert "sent in a step" in draw(tmp_path / "made.svg", [row]).read_text(encoding="utf-8")
