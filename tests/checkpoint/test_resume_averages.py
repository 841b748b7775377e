"""A rank with the weights of several pipelines, and a worker, in this process: verified, measured and continued."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from covering import sampled
from resume_runs import assert_same_run, record_of, run_here
from resume_zoo import OVERRIDES

from runner.checkpoint.file import read_checkpoint
from runner.config.compose.resolve import resolve
from runner.launch.run.prepare import prepare, write_request
from runner.record import read_steps
from runner.training.verify.reference import run_reference

SHAPE = ("schedule.microbatches=4", "trainer.grad_clip_norm=null", "trainer.max_steps=6")
ASKED = {
    "avgpipe": ("schedule=avgpipe", *SHAPE),
    "avgpipe in parts": ("schedule=avgpipe", "schedule.variant=updates", *SHAPE, "checkpoint.asynchronous=true"),
    "hetpipe": ("schedule=hetpipe", *SHAPE, "optimizer=sgd", "optimizer.momentum=0.9"),
}


@pytest.mark.parametrize("name", sampled(ASKED, "hetpipe", "avgpipe in parts"))
def test_it_goes_on_bit_for_bit_and_holds_what_was_predicted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, whole, resumed = ASKED[name], tmp_path / "whole", tmp_path / "resumed"
    run_here(monkeypatch, whole, *asked)
    run_here(monkeypatch, resumed, *asked, f"resume={whole / 'checkpoints' / 'step-3.ckpt'}")
    assert_same_run(whole, resumed)
    states = record_of(whole)["state_bytes"]
    for part in ("weights", "gradients", "optimizer"):
        assert [each[part] for each in states["predicted"]] == [each[part] for each in states["measured"]]
    for weight in read_checkpoint(whole / "checkpoints" / "step-6.ckpt")["optimizer_states"][0]["state"].values():
        kept = [key for key, value in weight.items() if isinstance(value, torch.Tensor) and value.dim()]
        assert len(kept) == (1 if name == "hetpipe" else 2 * 3)  # the weight, and two moments, of two pipelines


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
