"""What DeepSpeed's release of the paper's time reserves otherwise than the one that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.compose.resolve import resolve
from runner.model.data import example_batch
from runner.recipes.benchmarks import table5_2022
from runner.recipes.benchmarks.memory_trace import MemoryTrace, trace_of
from runner.recipes.benchmarks.table5_2022 import predicted
from runner.recipes.rudalle import table5
from runner.recipes.rudalle.table5 import PUBLISHED, STAGES

LAYERS = 8
ELEMENTS = 25_000_000  # of each layer's weight: 100 MB, as a gradient
ACTIVATIONS = 3_000_000_000  # bytes of each layer, freed in its backward


def made() -> MemoryTrace:
    """A trace whose memory is highest where its backward begins."""
    events: list[tuple[str, int, int]] = []
    for layer in range(LAYERS):
        events += [("+", layer, ACTIVATIONS), ("layer", layer, 0)]
    events.append(("backward", 0, 0))
    for layer in reversed(range(LAYERS)):
        gradient = LAYERS + layer
        events += [("+", gradient, 4 * ELEMENTS), ("gradient", gradient, layer), ("-", layer, 0)]
    return MemoryTrace(tuple(events), (ELEMENTS,) * LAYERS, tuple(range(LAYERS)))


def test_what_is_held_where_the_backward_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In units of all weights, which are smaller than a bucket: what is named is held by 0.19.8 or by 0.5.9 alone."""
    monkeypatch.setattr(table5_2022, "PUBLISHED", {("adam", stage): PUBLISHED["adam", stage] for stage in STAGES})
    both = predicted(made())
    weights = 4 * ELEMENTS * LAYERS
    changes = {key: (then - now) / weights for key, (now, then) in both.items()}
    assert changes["adam", 0] == pytest.approx(-1, abs=0.05), "the buffer of gradients"
    assert changes["adam", 1] == pytest.approx(-1, abs=0.05), "the bucket"
    assert changes["adam", 2] == pytest.approx(0, abs=0.05), "its flat copy is made when activations are gone"
    assert changes["adam", 3] == pytest.approx(1, abs=0.05), "a second bucket"


@pytest.mark.costly
def test_the_figures_of_the_page() -> None:
    config = resolve(["recipe=rudalle_table5_full", "zero.stage=0"])
    both = predicted(trace_of(config, *example_batch(config.data, 3, config.seed)))
    assert both.keys() == PUBLISHED.keys()
    assert all(now > 0 and then > 0 for now, then in both.values())
    page = (Path(table5.__file__).parent / "README.md").read_text(encoding="utf-8")
    for name, optimizer in (("Adam, Fused Adam", "adam"), ("8-bit Adam", "adam8bit")):
        cells = ((both[optimizer, stage][1], PUBLISHED[optimizer, stage][0]) for stage in STAGES)
        assert f"| {name} | " + " | ".join(f"{then / 1e9:.1f} / {paper}" for then, paper in cells) + " |" in page
