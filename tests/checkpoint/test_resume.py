"""N + M steps in one go, or with a stop between them: no bit differs."""

# ruff: noqa: E501 - a row of a table stays in one line

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_runs import assert_same_run, record_of, run_here
from safetensors.torch import save_file

from runner.checkpoint.file import read_checkpoint
from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.launch.run.resume import with_checkpoint

ZOO = ["data.target=resume_zoo:data", "loss=mse", "data.batch_size=8", "device=cpu"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 steps, two epochs and a part of a third, a checkpoint after each step."""
    run_dir = tmp_path_factory.mktemp("resume") / "unbroken"
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(monkeypatch, run_dir)
    return run_dir


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step}.ckpt"


@pytest.mark.costly
@pytest.mark.parametrize("step", [4, 6])  # mid-epoch at a validation, at an epoch's end
def test_a_run_goes_on_from_a_path_in_a_new_place(
    step: int, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch, tmp_path / "resumed", f"resume={checkpoint(unbroken, step)}")
    assert_same_run(unbroken, tmp_path / "resumed")
    files = {path.name for path in (tmp_path / "resumed" / "checkpoints").iterdir()}
    assert files == {f"step-{number}.ckpt" for number in range(step + 1, 15)}
    ours, theirs = (read_checkpoint(checkpoint(place, 14)) for place in (tmp_path / "resumed", unbroken))
    assert ours["lr_schedulers"] == theirs["lr_schedulers"]
    for name, state in theirs["optimizer_states"][0]["state"].items():
        assert all(torch.equal(ours["optimizer_states"][0]["state"][name][key], state[key]) for key in state)


@pytest.mark.costly
def test_every_state_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters, the loss scale, averages, and the place of loaders with workers in a shuffled epoch."""
    request = ["precision=fp16", "precision.growth_interval=3", "data.workers=2", "trainer.ema_decay=0.9"]
    request += ["trainer.max_steps=9"]
    run_here(monkeypatch, tmp_path / "whole", *request)
    run_here(monkeypatch, tmp_path / "resumed", *request, f"resume={checkpoint(tmp_path / 'whole', 4)}")
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    ours, theirs = (flat(read_checkpoint(checkpoint(tmp_path / place, 9))) for place in ("resumed", "whole"))
    assert ours.keys() == theirs.keys()
    assert [name for name, value in theirs.items() if not torch.equal(ours[name], value)] == []
    assert any("loss_scale" in name for name in theirs)
    assert any("averaged_weights" in name for name in theirs)


@pytest.mark.costly
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_the_newest_and_the_best_are_kept(asynchronous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "run"
    request = ["trainer.val_every=1", "checkpoint.keep=2", "checkpoint.keep_best=2", "optimizer.lr=0.3"]
    request += ["resume=auto", f"checkpoint.asynchronous={asynchronous}", "lr_scheduler.name=constant"]
    run_here(monkeypatch, place, *request, "trainer.max_steps=5")
    record = run_here(monkeypatch, place, *request, "trainer.max_steps=9")
    ranked = [step for _, step in sorted((value, -step) for step, value in record["val_loss"])]
    best = {-step for step in ranked[:2]}
    assert best - {8, 9}, "the test shows nothing"
    files = {path.name for path in (place / "checkpoints").iterdir()}
    assert files == {f"step-{step}.ckpt" for step in best | {8, 9}}
    assert record["artifacts"]["checkpoint"] == "checkpoints/step-9.ckpt"
    assert record["artifacts"]["best_checkpoint"] == f"checkpoints/step-{-ranked[0]}.ckpt"


def test_the_copy_that_is_saved_in_the_background_is_counted(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and two states of each, once; the counters of steps are left out of the prediction."""
    saving = run_here(monkeypatch, tmp_path / "run", "checkpoint.asynchronous=true", "trainer.max_steps=4")
    peaks, before = saving["peak_memory_bytes"], record_of(unbroken)["peak_memory_bytes"]
    copied = {kind: peaks[kind][0] - before[kind][0] for kind in ("predicted", "measured")}
    weights = (6 * 12 + 12 + 12 * 12 + 12 + 12 * 3 + 3) * 4
    assert copied["measured"] == pytest.approx(3 * weights, rel=0.02)
    assert copied["predicted"] == pytest.approx(3 * weights, rel=0.02)


def test_a_save_in_the_background_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.checkpoint import parts as part_files
    from runner.errors import RunFailedError

    def fill_up(tensors: Any, path: Path, header: Any) -> None:
        save_file(tensors, path, header)
        if "step-3.ckpt" in str(path):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(part_files, "save_file", fill_up)
    place = tmp_path / "run"
    with pytest.raises(RunFailedError, match=r"step-3\.ckpt/rank-0-of-1\.safetensors could not be .*No space left"):
        run_here(monkeypatch, place, "checkpoint.asynchronous=true", "checkpoint.keep=1")
    good = {path.parent.name for path in (place / "checkpoints").glob("*/rank-0-of-1.safetensors")}
    assert "step-2.ckpt" in good
    assert "step-3.ckpt" not in good
    assert list((place / "checkpoints").glob("*/.unfinished*")) == []


def flat(content: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors and numbers of weights, averages, optimizers and schedulers, by where they stand."""
    if not path:
        kept = ("state_dict", "averaged_weights", "optimizer_states", "lr_schedulers")
        content = {name: content[name] for name in kept if name in content}
    if isinstance(content, dict | list | tuple):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return {name: tensor for key, value in items for name, tensor in flat(value, f"{path}/{key}").items()}
    return {path: torch.as_tensor(content)} if isinstance(content, torch.Tensor | float | int) else {}


@pytest.mark.costly
def test_auto_starts_then_goes_on_and_then_has_nothing_to_do(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "auto"
    first = run_here(
        monkeypatch, place, "resume=auto", "trainer.max_steps=8", "lr_scheduler.total_steps=14", "checkpoint.keep=3"
    )
    assert first["steps"] == 8
    assert sorted(path.name for path in (place / "checkpoints").iterdir()) == [f"step-{n}.ckpt" for n in (6, 7, 8)]
    os.truncate(checkpoint(place, 8), 1000)  # it was killed while it wrote
    assert first["val_loss"][-1][0] == 8  # this is cut back, too
    second = run_here(monkeypatch, place, "resume=auto", "lr_scheduler.total_steps=14", "checkpoint.keep=3")
    assert_same_run(unbroken, place)
    idle = run_here(monkeypatch, place, "resume=auto", "lr_scheduler.total_steps=14")
    assert_same_run(unbroken, place)
    assert second["state_bytes"]["measured"][0]["gradients"] > 0
    assert idle["state_bytes"] == second["state_bytes"], "counted where nothing was trained"
    assert idle["peak_memory_bytes"]["measured"] == []


def test_without_a_good_checkpoint_auto_starts_anew(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "anew"
    run_here(monkeypatch, place, "trainer.max_steps=3")
    for path in (place / "checkpoints").iterdir():
        path.write_bytes(b"")
    run_here(monkeypatch, place, "resume=auto")
    assert_same_run(unbroken, place)


def test_the_request_decides_what_it_names(unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [
        "lr_scheduler.name=constant",
        "optimizer.lr=0.02",
        "optimizer.weight_decay=0.5",
        "optimizer.betas=[0.5,0.9]",
    ]
    run_here(monkeypatch, tmp_path / "new", f"resume={checkpoint(unbroken, 12)}", *changed)
    (group,) = read_checkpoint(checkpoint(tmp_path / "new", 14))["optimizer_states"][0]["param_groups"]
    assert (group["lr"], group["weight_decay"], tuple(group["betas"])) == (0.02, 0.5, (0.5, 0.9))
    assert record_of(tmp_path / "new")["loss"][:12] == record_of(unbroken)["loss"][:12]


def test_memory_is_measured_with_the_restored_states(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = run_here(monkeypatch, tmp_path / "new", f"resume={checkpoint(unbroken, 11)}")
    peaks = [record["peak_memory_bytes"]["measured"] for record in (record_of(unbroken), resumed)]
    assert peaks[0] == peaks[1]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (["model.target=resume_zoo:deeper"], r"0\.weight is \(16, 6\), in the checkpoint \(12, 6\); 0\.bias .*; 2\.weight \(12, 16\) is not in the checkpoint; and \d+ more"),
        (["model.target=resume_zoo:model", "data.batch_size=4"], r"data\.batch_size = 4: must be 8, as in the checkpoint\..* Try data\.batch_size=8"),
        (["model.target=resume_zoo:model", "seed=3", "optimizer=sgd"], r"seed = 3: must be 0.*\n.*optimizer\.name = sgd: must be auto.* Try optimizer=auto"),
        (["model.target=resume_zoo:model", "trainer.max_steps=5"], r"trainer\.max_steps = 5: must be at least 6.* Try trainer\.max_steps=11"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused_before_anything_is_written(
    changed: list[str],
    told: str,
    unbroken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    monkeypatch.chdir(tmp_path)
    assert main(["train", *ZOO, *changed, f"resume={checkpoint(unbroken, 6)}", "run_dir=new"]) == 2
    assert re.search(told, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_resume_auto_takes_no_words_from_the_run(unbroken: Path) -> None:
    """Without them the default recipe would be compared with the checkpoint, tensor by tensor."""
    from runner.errors import RequestError

    command = record_of(unbroken)["command"]
    with pytest.raises(RequestError) as caught:
        with_checkpoint(resolve([f"run_dir={unbroken}", "resume=auto"]))
    (problem,) = caught.value.problems
    assert (
        problem.why == "The run's model is resume_zoo:model, and this request's is runner.recipes.rudalle.model:build"
    )
    assert problem.fix.startswith(command.partition(" run_dir")[0])
    assert problem.fix.endswith("resume=auto")


def test_files_that_are_no_checkpoints_are_refused_with_what_would_do(unbroken: Path, tmp_path: Path) -> None:
    from runner.errors import RequestError

    torch.save({"state_dict": {}, "global_step": 1}, tmp_path / "stranger.ckpt")
    half = tmp_path / "step-3.ckpt"
    half.write_bytes(checkpoint(unbroken, 3).read_bytes()[:2000])
    for path, told in (
        (tmp_path / "none.ckpt", "There is no such file"),
        (half, "damaged or cut short"),
        (tmp_path / "stranger.ckpt", "was not written by `runner train`"),
        (unbroken, f"This is a directory. Try resume={checkpoint(unbroken, 14)}"),
    ):
        config = resolve([*ZOO, "model.target=resume_zoo:model", f"resume={path}"])
        with pytest.raises(RequestError) as caught:
            with_checkpoint(config)
        assert told in str(caught.value)


def test_other_data_is_refused(unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.errors import RequestError

    with pytest.raises(RequestError, match=r"must have 6 steps per epoch.* These have 2"):
        run_here(monkeypatch, tmp_path / "new", f"resume={checkpoint(unbroken, 3)}", "+data.kwargs.samples=16")
