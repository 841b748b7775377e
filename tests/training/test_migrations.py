"""Layers that move between stages while a run trains change no bit of it."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import user_project
import warm
from covering import sampled
from thread_runs import result
from torch import nn

from runner.checkpoint.file import read_checkpoint
from runner.config.compose.resolve import resolve
from runner.engine.transport.base import Channel
from runner.engine.transport.objects import receive_value, send_value
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.errors import RequestError, RunFailedError
from runner.launch.verify import verify
from runner.model.layers import build_stage, layers_of
from runner.plan.cautions import approximations
from runner.schedule.catalogue.registry import build
from runner.strategy.migration import Move, emptied, moves_between, require_movable

STEPS = 8
RUN = (
    "schedule.microbatches=4", f"trainer.max_steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=9",
    "partition=manual",
)  # fmt: skip
PLAIN = ("parallelism.pipeline=2", "schedule=1f1b", "optimizer=adamw", "model.kwargs.dropout=0.2")
TWO = ("[4]", "{3: [2], 6: [5]}")  # of seven layers
CASES = {
    "dropout": (PLAIN, *TWO),
    "there and back": (PLAIN, "[4]", "{3: [2], 6: [4]}"),
    "masters": ((*PLAIN, "precision=bf16_master"), *TWO),
    "loss scale": ((*PLAIN, "precision=fp16"), *TWO),
    "averages": ((*PLAIN, "trainer.ema_decay=0.9"), *TWO),
    "replicas": ((*PLAIN, "parallelism.data=2", "trainer.grad_clip_norm=0.1"), *TWO),
    "run again": ((*PLAIN, "activation_checkpoint=full"), *TWO),
    "saved beside steps": ((*PLAIN, "checkpoint=asynchronous", "checkpoint.every=2"), *TWO),
    "frozen": ((*PLAIN, "trainer.freeze=[4.*]", "lr_scheduler=cosine"), *TWO),
    "three stages": (
        ("parallelism.pipeline=3", "schedule=gpipe", "optimizer=sgd", "optimizer.momentum=0.9"),
        "[2,4]", "{3: [1,5], 6: [3,6]}",
    ),
    "chunks": (
        ("parallelism.pipeline=2", "schedule=interleaved_1f1b", "schedule.chunks=2", "optimizer=adamw"),
        "[2,4,5]", "{3: [1,5,6], 6: [1,2,3]}",
    ),
    "split backward": (("parallelism.pipeline=2", "schedule=zb_h1", "optimizer=adamw"), *TWO),
    "layers made late": ((*PLAIN[:3], "model.target=user_code:Lazy"), "[2]", "{3: [1], 6: [3]}"),
    "matrices": ((*PLAIN[:2], "optimizer=muon", "precision=bf16_master"), *TWO),
    "large batches": ((*PLAIN[:2], "optimizer=lamb"), *TWO),
    "variance of one": ((*PLAIN[:2], "optimizer=adabelief"), *TWO),
    "of Lightning": (
        (*PLAIN[:3], "model.target=user_lightning:Layered", "loss=auto"), "[3]", "{3: [1], 6: [4]}"
    ),
    "a traced step": (
        (*PLAIN[:3], "model.target=user_lightning:Traced", "loss=auto"), "[2]", "{3: [1], 6: [3]}"
    ),
    "running averages": ((*PLAIN[:3], "model.target=user_code:normed"), "[2]", "{3: [1], 6: [3]}"),
}  # fmt: skip


def run(directory: Path, case: str, name: str, *more: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    words, cut, _ = CASES[case]
    return result(directory, *RUN, *words, f"partition.boundaries={cut}", *more, run=name)


def checkpoint(directory: Path, name: str, step: int) -> Path:
    return directory / name / "checkpoints" / f"step-{step}.ckpt"


def state(directory: Path, name: str) -> dict[str, Any]:
    content = read_checkpoint(checkpoint(directory, name, STEPS))
    return {key: content[key] for key in ("state_dict", "optimizer_states", "averaged_weights") if key in content}


def require_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            require_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            require_equal(each, its)
    else:
        assert one == other


@pytest.mark.parametrize("case", sampled(CASES, "dropout", "masters", "running averages", "of Lightning"))
def test_eight_steps_with_two_moves_are_those_without(tmp_path: Path, case: str) -> None:
    without, weights = run(tmp_path, case, "without")
    moved, found = run(tmp_path, case, "moved", f"partition.migrate={CASES[case][2]}")
    assert moved["loss"] == without["loss"]
    assert moved["val_loss"] == without["val_loss"]
    require_equal(found, weights)
    require_equal(state(tmp_path, "moved"), state(tmp_path, "without"))
    peaks = moved["peak_memory_bytes"]
    assert all(map(int.__le__, peaks["measured"], peaks["predicted"]))
    assert [each["after_step"] for each in moved["layer_moves"]] == [3, 6]
    assert len(moved["step_seconds"]["all"]) == STEPS - 4  # two that count bytes, and the first of each new cut


def test_the_record_says_what_moved(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "there and back", "run", "partition.migrate={3: [2], 6: [4]}")
    there, back = found["layer_moves"]
    assert there["layers"] == [[2, 0, 1], [3, 0, 1]]
    assert back["layers"] == [[2, 1, 0], [3, 1, 0]]
    assert there["bytes"] == back["bytes"] == 2 * 3 * 12 * 4  # of the norm: weight and bias, each with two moments
    assert there["seconds"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "layers_moved" in line] == [4, 7]


def test_a_resume_goes_on_in_the_cut_of_its_step(tmp_path: Path) -> None:
    case = "dropout"
    whole, weights = run(tmp_path, case, "whole", f"partition.migrate={TWO[1]}")
    resume = f"resume={checkpoint(tmp_path, 'whole', 4)}"
    again, found = run(tmp_path, case, "again", f"partition.migrate={TWO[1]}", resume)
    assert again["loss"] == whole["loss"]
    require_equal(found, weights)
    assert [each["after_step"] for each in again["layer_moves"]] == [6]
    _, of_one_cut = run(tmp_path, case, "of one cut", resume)
    require_equal(of_one_cut, weights)


@pytest.mark.costly
def test_processes_move_layers(tmp_path: Path) -> None:
    directory = user_project.make_directory(tmp_path)
    words = (*RUN, *PLAIN, "partition.boundaries=[4]")
    without, weights = user_project.result(directory, *words, run="without")
    moved, found = user_project.result(directory, *words, f"partition.migrate={TWO[1]}", run="moved")
    assert moved["loss"] == without["loss"]
    require_equal(found, weights)
    assert len(moved["layer_moves"]) == 2


def test_a_run_with_moves_is_verified(tmp_path: Path) -> None:
    """Of a layer that has left a rank, no gradient of an earlier step is compared."""
    directory = user_project.make_directory(tmp_path)
    cuts = ("schedule.microbatches=4", "partition=manual", "partition.boundaries=[4]", "partition.migrate={1: [2]}")
    words = [word for word in user_project.OVERRIDES if not word.startswith(("run_dir", "trainer.max_steps"))]
    command = [sys.executable, "-m", "runner", "verify", *words, *PLAIN, *cuts, "--steps", "3"]
    done = warm.run(command, cwd=directory, env=user_project.environment(directory))
    assert done.returncode == 0, done.stdout + done.stderr


def test_hooks_that_layers_have_from_the_start_end_a_run_before_its_first_step(tmp_path: Path) -> None:
    words = (
        "model.target=user_code:with_weight_norm",
        *PLAIN[:3],
        "partition.boundaries=[2]",
        "partition.migrate={3: [1]}",
    )
    with pytest.raises(RunFailedError, match="layer 1 has hooks"):
        result(tmp_path, *RUN, *words)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_verification_ends_after_the_last_move(tmp_path: Path) -> None:
    words = ["model=mlp", *PLAIN[:3], "partition=manual", "partition.boundaries=[4]", "partition.migrate={20: [2]}"]
    with pytest.raises(RequestError, match=r"--steps = 4: must be above 20\..*Try --steps 21\."):
        verify(resolve([*words, "trainer.max_steps=40"]), steps=4)


def test_a_callback_of_a_user_is_told_that_weights_move() -> None:
    config = resolve(["model=mlp", "partition.migrate={20: [2]}", "+callbacks.mine.target=mine:Clamp"])
    (told,) = approximations(config, build("1f1b", 2, 4))
    assert "parameters that callbacks.mine keeps" in told


@cache
def stage() -> Any:
    return build_stage(layers_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 0), 0, 1)


def test_what_would_stay_behind_is_not_moved() -> None:
    held = stage()
    require_movable([held], [Move(1, 0, 1)])
    handle = held.layers[0].register_forward_hook(lambda *_: None)
    require_movable([held], [Move(1, 0, 1)])  # the layer with the hook stays
    with pytest.raises(RunFailedError, match="layer 0 has hooks"):
        require_movable([held], [Move(0, 0, 1)])
    handle.remove()
    handle = held.layers[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(RunFailedError, match="layer 0 has hooks"):
        require_movable([held], [Move(0, 0, 1)])
    handle.remove()
    held.layers[0].draws = torch.Generator()
    with pytest.raises(RunFailedError, match="layer 0 draws from a generator of its own"):
        require_movable([held], [Move(0, 0, 1)])
    del held.layers[0].draws
    held.layers[1].running_mean = torch.zeros(3)
    with pytest.raises(RunFailedError, match=r"buffer 1\.running_mean has another shape"):
        require_movable([held], [])


def test_the_layers_that_move_are_those_whose_rank_changes() -> None:
    assert moves_between(((0, 3), (4, 6)), ((0, 1), (2, 6)), (0, 1)) == (Move(2, 0, 1), Move(3, 0, 1))
    of_chunks = moves_between(((0, 0), (1, 1), (2, 3)), ((0, 1), (2, 2), (3, 3)), (0, 1, 0))
    assert of_chunks == (Move(1, 1, 0), Move(2, 0, 1))


def test_shared_tensors_keep_their_memory() -> None:
    shared = torch.ones(3)
    layer = nn.Linear(2, 2)
    layer.register_buffer("table", shared)
    emptied(layer, [shared])
    assert shared.numel() == 3
    assert not any(each.numel() for each in layer.parameters())


def test_values_keep_their_bits_between_ranks() -> None:
    sent: dict[str, Any] = {
        "turned": torch.arange(6.0).view(2, 3).t(),
        "half": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
        "step": torch.tensor(7.0),
        "empty": torch.zeros(0, 4),
        "flags": [torch.tensor([True, False]), (3, "name", None)],
    }

    def exchange(transport: ThreadTransport) -> Any:
        if transport.rank == 0:
            for handle, _ in send_value(sent, transport, 1, Channel.ACTIVATION):
                handle.wait()
            return None
        return receive_value(transport, 0, Channel.ACTIVATION)

    _, found = run_ranks(2, exchange)
    assert found["turned"].stride() == sent["turned"].stride()
    assert torch.equal(found["half"].view(torch.int16), sent["half"].view(torch.int16))
    for each in (sent, found):
        del each["half"]
    require_equal(found, sent)


def test_an_optimizer_of_its_own_does_not_move(tmp_path: Path) -> None:
    words = (*RUN, *PLAIN[:2], "model.target=user_lightning:Whole", "loss=auto", "optimizer=auto")
    with pytest.raises(RequestError, match="needs an optimizer of the request"):
        result(tmp_path, *words, "partition.boundaries=[2]", "partition.migrate={3: [1]}")


def test_a_tie_is_not_taken_apart(tmp_path: Path) -> None:
    words = (*RUN, *PLAIN[:3], "model.target=user_code:tied", "partition.boundaries=[2]")
    with pytest.raises(RequestError, match="must not move layer"):
        result(tmp_path, *words, "partition.migrate={3: [1]}")
