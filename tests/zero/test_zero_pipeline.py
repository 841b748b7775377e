"""ZeRO over the data axis of each pipeline stage, and checkpoints that know nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from user_project import plain_result
from zero_ranks import Result, train_all

GRID = (
    "parallelism.pipeline=2", "parallelism.data=2", "schedule.microbatches=4", "data.kwargs.samples=17",
    "trainer.grad_clip_norm=0.05",
)  # fmt: skip
CPU = "offload.optimizer=cpu"


def state_elements(run_dir: Path) -> int:
    """Elements of optimizer state on rank 0."""
    return int(json.loads((run_dir / "live.json").read_text(encoding="utf-8"))["state elements"])


@pytest.mark.slow
def test_pipelines_with_zero_are_the_plain_loop(tmp_path: Path) -> None:
    """Clipped by the norm of all stages, with short steps whose micro-batches some replicas have no sample for."""
    runs = {
        "bytes_ddp": GRID,
        "zero_0": (*GRID, "zero.stage=0"),
        "bytes_1": (*GRID, "zero.stage=1"),
        "zero_2": (*GRID, "zero.stage=2"),
        "zero_1_cpu": (*GRID, "zero.stage=1", CPU, "schedule=gpipe"),
        "zero_2_cpu": (*GRID, "zero.stage=2", CPU),
    }
    found = train_all(tmp_path, runs, ranks=4)
    losses, state = plain_result(samples=17, replicas=2, by_replica=True, count=4, clip_norm=0.05)
    for name, result in found.items():
        assert result.loss == pytest.approx(losses, rel=1e-6), name
        for key, weight in state.items():
            torch.testing.assert_close(result.weights[key], weight, atol=2e-6, rtol=2e-6, msg=f"{name}: {key}")
    assert found["zero_0"].loss == found["bytes_ddp"].loss == losses
    whole, shared = state_elements(tmp_path / "bytes_ddp"), state_elements(tmp_path / "bytes_1")
    assert whole / 2 <= shared <= whole / 2 + 8  # two states, each padded by at most an alignment


SPLIT = (
    *GRID, "model.target=zero_model:model", "model.kwargs.width=33", "model.kwargs.depth=6", "checkpoint.every=2",
    "checkpoint.keep=2", "lr_scheduler=linear", "partition=uniform",
)  # fmt: skip
KINDS = {"split": "schedule=zb_h1", "v": "schedule=zb_v"}


@pytest.mark.full
@pytest.mark.timeout(700)
def test_states_shared_out_by_the_runner_are_halved_and_the_run_is_the_same(tmp_path: Path) -> None:
    """Several stages per rank, and backwards in two parts; checkpoints are whole, whoever shared out."""
    momentum = ("optimizer=sgd", "optimizer.momentum=0.9", "precision=bf16")
    after = f"resume={tmp_path / 'bytes_v_1' / 'checkpoints' / 'step-2.ckpt'}"
    runs = {
        **{f"bytes_{kind}": (*SPLIT, schedule) for kind, schedule in KINDS.items()},
        **{f"bytes_{kind}_1": (*SPLIT, schedule, "zero.stage=1") for kind, schedule in KINDS.items()},
        "momentum": (*SPLIT, KINDS["v"], *momentum),
        "momentum_1": (*SPLIT, KINDS["v"], *momentum, "zero.stage=1"),
        "resumed": (*SPLIT, KINDS["v"], "zero.stage=1", after),
        "without": (*SPLIT, KINDS["v"], after),
        "elsewhere": (*SPLIT, "schedule=interleaved_1f1b", "zero.stage=1", after),
    }
    found = train_all(tmp_path, runs, ranks=4, seconds=600)
    whole = {name: name.removesuffix("_1") for name in runs if name.endswith("_1")}
    whole |= dict.fromkeys(("without", "elsewhere"), "bytes_v")
    for name, other in whole.items():
        rounding = 4e-2 if name == "momentum_1" else 2e-6
        assert found[name].loss == pytest.approx(found[other].loss, rel=rounding), name
        for key, weight in found[other].weights.items():
            torch.testing.assert_close(
                found[name].weights[key], weight, atol=rounding, rtol=rounding, msg=f"{name}: {key}"
            )
    shared, resumed = found["bytes_v_1"], found["resumed"]
    assert resumed.loss == shared.loss
    assert [key for key in shared.weights if not torch.equal(shared.weights[key], resumed.weights[key])] == []
    for kind in KINDS:
        every, own = state_elements(tmp_path / f"bytes_{kind}"), state_elements(tmp_path / f"bytes_{kind}_1")
        assert every / 2 <= own <= every / 2 + 2
        assert_as_predicted(found[f"bytes_{kind}_1"])


def assert_as_predicted(result: Result) -> None:
    """States within 2 %, peaks within 5 %; weights are gathered once, from one replica to the other."""
    for told in zip(*result.record["state_bytes"].values(), strict=True):
        predicted, measured = told
        assert measured == pytest.approx(predicted, rel=0.02)
    peaks = result.record["peak_memory_bytes"]
    for predicted, measured in zip(peaks["predicted"], peaks["measured"], strict=True):
        assert measured == pytest.approx(predicted, rel=0.05)
    weights = sum(weight.nbytes for weight in result.weights.values())
    assert result.record["bytes_moved"]["weights"] == pytest.approx(weights, rel=1e-3)


@pytest.mark.full
@pytest.mark.slow
def test_a_run_goes_on_under_another_stage_bit_by_bit(tmp_path: Path) -> None:
    """Stage 1 sums as plain data parallelism does, so that where a run stops and goes on changes nothing."""
    start = ("parallelism.data=2", "data.kwargs.samples=24", "trainer.max_steps=2", "optimizer.weight_decay=0.1")
    go_on = ("parallelism.data=2", "data.kwargs.samples=24", "trainer.max_steps=4", "optimizer.weight_decay=0.1")

    def after(name: str) -> str:
        return f"resume={tmp_path / name / 'checkpoints' / 'step-2.ckpt'}"

    masters = ("precision=bf16_master",)
    runs = {
        "plain": start,
        "one": (*start, "zero.stage=1"),
        "three": (*start, "zero.stage=3", CPU),
        "whole": go_on,
        "plain_to_one": (*go_on, "zero.stage=1", after("plain")),
        "one_to_plain": (*go_on, after("one")),
        "three_to_two": (*go_on, "zero.stage=2", CPU, after("three")),
        "plain_to_three": (*go_on, "zero.stage=3", after("plain")),
        "masters": (*start, *masters, "zero.stage=1"),
        "masters_whole": (*go_on, *masters, "zero.stage=1"),
        "masters_to_three": (*go_on, *masters, "zero.stage=3", after("masters")),
        "masters_to_plain": (*go_on, *masters, after("masters")),
    }
    found = train_all(tmp_path, runs)
    for name in ("plain_to_one", "one_to_plain", "three_to_two", "plain_to_three"):
        assert found[name].loss == pytest.approx(found["whole"].loss, rel=1e-6), name
        for key, weight in found["whole"].weights.items():
            torch.testing.assert_close(found[name].weights[key], weight, atol=1e-6, rtol=1e-6, msg=f"{name}: {key}")
    for name in ("masters_to_three", "masters_to_plain"):
        assert found[name].loss == pytest.approx(found["masters_whole"].loss, rel=2e-3), name
