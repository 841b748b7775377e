"""What ``runner train`` refuses of places, checkpoints and functions, ``runner plan`` refuses with the same words."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.main import main
from runner.record import RunRecord

TINY = ("model=mlp", "data.batch_size=8", "logger=none")


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))


@pytest.mark.costly
@pytest.mark.parametrize(
    "word",
    [
        pytest.param("resume=broken.ckpt", id="a broken checkpoint"),
        pytest.param("run_dir=broken.ckpt", id="a directory that is a file"),
        pytest.param("callbacks=early_stopping", id="a callback that has nothing to look at"),
        pytest.param("metrics.x=nowhere_at_all:f", id="a metric in no module"),
    ],
)
def test_both_say_the_same(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.ckpt").write_bytes(b"PK\x03\x04 not an archive")
    said = []
    for command in ("train", "plan"):
        assert main([command, *TINY, word]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert said[0].startswith(word.partition("=")[0])
    assert {path.name for path in Path().iterdir()} <= {"broken.ckpt", "cache"}


@pytest.mark.costly
def test_a_directory_that_holds_a_run_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    RunRecord(status="ok").save(_made(Path("before")))
    assert main(["plan", *TINY, "run_dir=before"]) == 0
    assert "runner train would refuse this: run_dir = before: must be new or empty." in " ".join(
        capsys.readouterr().out.split()
    )


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
