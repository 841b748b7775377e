"""A plan for this machine says when its ranks share cores, and how long a step then takes at least."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from runner.config.compose.resolve import resolve
from runner.plan import core_notes
from runner.plan.make import make_plan
from runner.profiling.model import profile_model


@pytest.mark.parametrize(
    ("cores", "told"), [(2, "4 ranks share 2 cores: a step takes at least "), (4, ""), (1, "1 core:")]
)
def test_ranks_that_share_cores_are_told(cores: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_notes, "num_cores", lambda: cores)
    config = resolve(["model=mlp", "parallelism.pipeline=4", "schedule.microbatches=8", "device=cpu"])
    profile = profile_model(config)
    layers = [replace(layer, forward_seconds=0.01, backward_seconds=0.02) for layer in profile.layers]
    profile = replace(profile, layers=tuple(layers), seconds_source="measured")
    notes = [note for note in make_plan(config, profile).advice if " share " in note]
    assert len(notes) == bool(told)
    assert all(told in note for note in notes)
    if cores == 2:
        value, unit = re.findall(r"at least ([0-9.]+) (ms|s)", notes[0])[0]
        least = len(layers) * 0.03 * 8 / 2  # the loss, which is measured in milliseconds or less, comes on top
        assert least * 0.99 <= float(value) * {"ms": 1e-3, "s": 1}[unit] <= least * 1.1
