"""A file's code runs where the request names it, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resume_runs import assert_same_run, run_here
from resume_zoo import OVERRIDES
from strangers import TRACE, Thing

from runner.checkpoint.file import PickledError, admitted, newest_good_checkpoint, read_checkpoint
from runner.checkpoint.file import write_checkpoint as write
from runner.cli.main import main
from runner.errors import RequestError, RunFailedError

NAMED = "checkpoint.allow_pickle=[strangers:leave_trace]"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("allow") / "unbroken"
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(monkeypatch, run_dir)
    return run_dir


@pytest.fixture
def strange(unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory, the working one's `run`, whose only checkpoint would run code."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run" / "checkpoints" / "step-6.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({**read_checkpoint(unbroken / "checkpoints" / path.name), "callbacks": {"theirs": Thing()}}, path)
    return path


@pytest.mark.costly
@pytest.mark.parametrize("resume", ["run/checkpoints/step-6.ckpt", "auto"])
def test_what_is_not_named_does_not_run(resume: str, strange: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = strange.read_bytes()
    assert main(["train", *OVERRIDES, f"resume={resume}", f"run_dir={'run' if resume == 'auto' else 'new'}"]) == 2
    assert (
        "checkpoints/step-6.ckpt: must hold tensors and plain values. It would call strangers:leave_trace to make what "
        f"is neither a tensor nor a plain value; name what you trust. Try '{NAMED}'."
    ) in capsys.readouterr().err
    assert strange.read_bytes() == before
    assert [path.name for path in Path().iterdir()] == ["run"]


@pytest.mark.costly
def test_what_is_named_runs_and_the_run_goes_on(
    unbroken: Path, strange: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch, tmp_path / "resumed", f"resume={strange}", NAMED)
    assert_same_run(unbroken, tmp_path / "resumed")
    assert Path(TRACE).exists()


def test_a_name_is_trusted_for_its_block_alone(strange: Path) -> None:
    with admitted(["strangers:leave_trace"]):
        assert newest_good_checkpoint(strange.parent)[0] == strange
    with pytest.raises(PickledError):
        newest_good_checkpoint(strange.parent)
    with admitted(["strangers:Thing"]), pytest.raises(PickledError):  # another of the same module
        read_checkpoint(strange)
    with (
        pytest.raises(RequestError, match=r"checkpoint.allow_pickle = strangers:nobody"),
        admitted(["strangers:nobody"]),
    ):
        pass


def test_what_is_named_may_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"state_dict": {}, "global_step": 1, "callbacks": Thing()}
    with pytest.raises(RunFailedError, match=r"would call strangers:leave_trace .* checkpoint.allow_pickle names"):
        write(content, tmp_path / "step-1.ckpt")
    with admitted(["strangers:leave_trace"]):
        write(content, tmp_path / "step-1.ckpt")
        assert read_checkpoint(tmp_path / "step-1.ckpt")["callbacks"] == 7


def test_export_asks_for_names_too(strange: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run", "model.safetensors"]) == 2
    assert "Try --allow-pickle strangers:leave_trace." in capsys.readouterr().err
    assert not Path(TRACE).exists()
    assert main(["export", "run", "model.safetensors", "--allow-pickle", "strangers:leave_trace"]) == 0
    assert Path("model.safetensors").exists()
