"""Weights of several pipelines on a rank, and a worker, in this process: equal to the reference of `runner verify`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resume_runs import run_here
from resume_zoo import OVERRIDES

from runner.config.compose.resolve import resolve
from runner.launch.run.prepare import prepare, write_request
from runner.record import read_steps
from runner.training.verify.reference import run_reference

SHAPE = ("schedule.microbatches=4", "trainer.grad_clip_norm=null", "trainer.max_steps=6")
ASKED = {
    "avgpipe": ("schedule=avgpipe", *SHAPE),
    "hetpipe": ("schedule=hetpipe", *SHAPE, "optimizer=sgd", "optimizer.momentum=0.9"),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", ["avgpipe", "hetpipe"])
def test_it_is_the_plain_loop(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_here(monkeypatch, tmp_path / "run", *ASKED[name])
    config = resolve([*OVERRIDES, f"run_dir={tmp_path / 'plain'}", *ASKED[name]])
    plan = prepare(config)
    (tmp_path / "plain").mkdir()
    write_request(config, plan, tmp_path / "plain", command="runner verify")
    random_state = torch.get_rng_state()
    run_reference(config, tmp_path / "plain")
    torch.set_rng_state(random_state)
    assert [step["loss"] for step in read_steps(tmp_path / "plain")] == found["loss"]
