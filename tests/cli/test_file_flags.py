"""Files that flags name are what their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.model.targets import import_users_code

_DRAWN = ("schedule", "schedule=gpipe", "parallelism.pipeline=2", "schedule.microbatches=2")


@pytest.mark.parametrize(
    ("flag", "file", "meant"),
    [
        ("svg", "x.png", "x.svg"),
        ("svg", "drawn.PDF", "drawn.svg"),
        ("svg", "cells.csv", "cells.svg"),
        ("csv", "cells.svg", "cells.csv"),
        ("trace", "events.gif", "events.json"),
    ],
)
def test_a_file_whose_name_says_something_else_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    file: str,
    meant: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*_DRAWN, f"--{flag}", file]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--{flag} = {file}: must end in {Path(meant).suffix}. ")
    assert line.endswith(f"Try --{flag} {meant}.")
    assert list(tmp_path.iterdir()) == []


def test_files_with_the_right_names_or_none_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*_DRAWN, "--svg", "a.svg", "--csv", "cells", "--trace", "c.json"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "c.json", "cells"]


def test_weights_need_neither_the_loss_nor_the_data_of_their_run() -> None:
    config = resolve(["model=mlp", "loss=custom", "loss.target=gone_module:loss"])
    import_users_code(config, model_alone=True)
    with pytest.raises(RequestError, match="gone_module"):
        import_users_code(config)


@pytest.mark.parametrize("words", [["evaluate", "runs/lr=0.1"], ["predict", "runs/lr=0.1", "./by=1.npy"]])
def test_a_path_with_a_sign_of_equality_is_no_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Directories of runs are often called after a value."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("RUN_DIR = runs/lr=0.1: must be a run's directory. ")
