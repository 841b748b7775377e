"""The recipe of divided layers: its formula against the plan of a request, and its pages."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.config.compose.resolve import resolve
from runner.model.sharded.plan import rules_of
from runner.plan.make import make_plan
from runner.profiling.model import profile_model
from runner.recipes.tensor.__main__ import markdown
from runner.recipes.tensor.asleep import Sleeping, llama
from runner.recipes.tensor.counted import Layout, Size, formula_bytes, words
from runner.recipes.tensor.figures import draw
from runner.recipes.tensor.grid_peers import compare as compare_grid
from runner.recipes.tensor.grid_peers import markdown as of_grid
from runner.recipes.tensor.kept import counted as kept_bytes
from runner.recipes.tensor.kept import formula_bytes as kept_by_formula
from runner.recipes.tensor.kernels import compare
from runner.recipes.tensor.kernels import markdown as of_kernels
from runner.recipes.tensor.peers import compare as compare_peers
from runner.recipes.tensor.stages import Grid, formulas, grid_words, grids
from runner.recipes.tensor.timed import layouts
from runner.recipes.tensor.timed import markdown as of_times
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


@pytest.mark.costly
def test_two_stages_of_two_parts_have_the_losses_of_one_process() -> None:
    sizes = {"width": 64, "layers": 2, "samples": 4, "tokens": 4, "microbatches": 2}
    rows = compare_grid(sizes, rounds=1)
    assert [row["contestant"] for row in rows] == ["runner", "torch, DTensor"]
    assert all(row["off"] < 1e-6 for row in rows)
    assert "| 64 | 4 x 4 | runner |" in of_grid(rows)


def test_a_model_whose_maps_sleep_is_the_model_of_transformers() -> None:
    """Values and gradients are those of the model, and its maps may be divided as its plan says."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = llama(1e-9, vocab_size=8, max_position_embeddings=4, **sizes)
    plain = copy.deepcopy(made)
    modules: list[Any] = [each for each in plain.modules() if isinstance(each, Sleeping)]
    for each in modules:
        each.__class__ = nn.Linear
    ids = torch.randint(8, (2, 4), generator=torch.Generator().manual_seed(1))
    for model in (made, plain):
        torch.autograd.backward(model(ids).square().sum())
    assert torch.equal(made(ids), plain(ids))
    for own, other in zip(made.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=0)
    rules = rules_of(made)
    assert rules is not None
    assert rules.style_of("model.layers.0.mlp.down_proj") == "row"


def test_four_ranks_have_six_layouts_and_the_fastest_is_named() -> None:
    six = sorted(layouts(4))
    assert six == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
    rows = [
        {"layout": each, "is_chosen": at == 1, "seconds": 1.0 + at, "measured": [2.0 + at, 4.0 + at], "load": [0.5, 2]}
        for at, each in enumerate(six)
    ]
    page = of_times([{"name": "2 x 2 x 2", "predicted": 0.9, "measured": 1.0, "load": 3.0}], rows)
    assert "| 2 x 2 x 2 | 0.900 s | 1.000 s | -10.0% | 3.0 |" in page
    assert "| 1 x 2 x 2, which `auto` takes | 2.000 s | 4.000 s | 33.3% | 0.5 to 2.0 |" in page


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
