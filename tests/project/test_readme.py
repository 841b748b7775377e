"""The README's commands, typed as they stand there; training is shortened to three steps."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import readme
import warm
from covering import sampled
from matplotlib.pyplot import imread
from readme import ROOT

SHORT = ["trainer.max_steps=3", "trainer.val_every=null", "trainer.progress=false"]
COMMANDS = readme.commands()
TARGETS = "model.target=mine:build"
OWN = next(words for words in COMMANDS if TARGETS in words)
FIRST = next(words for words in COMMANDS if "run_dir=outputs/first" in words)
PLANS = [words for words in COMMANDS if words[1] == "plan"]
DEFAULT = "pip install -e . && runner train"


def runner(words: list[str], directory: Path, status: int = 0, *, executed: bool = False) -> str:
    """Standard output of ``runner …`` in ``directory``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "runner", *words]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if executed:
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=1500, check=False
        )
    else:
        done = warm.run(command, cwd=directory, env=environment, timeout=1500)
    assert done.returncode == status, done.stderr
    return done.stdout


def record(run_dir: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    return made


def write_own_model(directory: Path) -> None:
    (code,) = readme.blocks("python")
    assert "import runner" not in code
    assert "from runner" not in code
    (directory / "mine.py").write_text(code, encoding="utf-8")


def test_the_two_commands() -> None:
    assert readme.installs() == [DEFAULT, "pip install -e '.[test]' && pytest"]


def test_every_command_is_tried_here() -> None:
    """A command that is added to the README is either quick, or one of the runs below."""
    assert {words[1] for words in COMMANDS} == {"train", "plan", "report"}
    trained = [words for words in COMMANDS if words[1] == "train"]
    assert len(trained) == 3
    assert sum("-m" in words for words in trained) == 1


@pytest.mark.parametrize("words", sampled(PLANS, PLANS[-1]), ids=lambda words: words[2])
def test_plans(words: list[str], tmp_path: Path) -> None:
    out = runner(words[1:], tmp_path)
    if "--json" in words:
        assert json.loads(out)["fits"] is True
    else:
        assert "fits: " in out


def test_the_pictures_command_draws_the_picture(tmp_path: Path) -> None:
    (text,) = [each for each in readme.quoted(readme.PROSE) if each.startswith("runner schedule schedule=")]
    runner(text.split()[1:], tmp_path)
    assert (tmp_path / "1f1b.svg").read_bytes() == (ROOT / "docs/images/1f1b.svg").read_bytes()


@pytest.mark.full
def test_a_first_run_and_its_report(tmp_path: Path) -> None:
    runner([*FIRST[1:], *SHORT], tmp_path, executed=True)
    assert record(tmp_path / "outputs/first")["status"] == "ok"
    assert record(tmp_path / "outputs/first")["layout"]["pipeline"] == 2
    (report,) = [words for words in COMMANDS if words[1] == "report"]
    assert "predicted" in runner(report[1:], tmp_path, executed=True)


@pytest.mark.full
def test_the_sweep(tmp_path: Path) -> None:
    (words,) = [each for each in COMMANDS if "-m" in each]
    runner([*words[1:], *SHORT, "run_dir=sweep"], tmp_path)
    assert [record(tmp_path / "sweep" / str(job))["status"] for job in range(4)] == ["ok"] * 4


@pytest.mark.costly
def test_your_own_model_in_one_process_and_in_four(tmp_path: Path) -> None:
    write_own_model(tmp_path)
    runner([*OWN[1:], "run_dir=four"], tmp_path)
    single = [word for word in OWN[1:] if not word.startswith(("parallelism.", "report="))]
    runner([*single, "run_dir=one"], tmp_path)
    one, four = record(tmp_path / "one"), record(tmp_path / "four")
    assert (one["layout"]["world_size"], four["layout"]["world_size"]) == (1, 4)
    assert len(one["loss"]) == four["steps"]
    assert one["loss"] == four["loss"]
    assert one["val_loss"][0] == pytest.approx(four["val_loss"][0], rel=1e-6)
    # It learned, on data that holds both classes in both parts, and there is a picture of it.
    assert four["val_loss"][-1][1] < 0.3
    (told,) = re.findall(r"at a loss of ([0-9.]+):", readme.TEXT)
    assert four["val_loss"][-1][1] == pytest.approx(float(told), abs=0.02)
    assert four["artifacts"]["spirals"] == "spirals.png"
    picture = imread(tmp_path / "four" / "spirals.png")
    assert picture.shape == imread(ROOT / "docs/images/spirals.png").shape
    assert len(set(map(tuple, picture.reshape(-1, 4).tolist()))) > 100


def test_both_parts_of_the_spirals_hold_both_arms(tmp_path: Path) -> None:
    write_own_model(tmp_path)
    spec = importlib.util.spec_from_file_location("mine_of_the_readme", tmp_path / "mine.py")
    assert spec is not None
    assert spec.loader is not None
    mine: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    for part in mine.spirals():
        _, arm = part.tensors
        assert 0.4 < arm.float().mean() < 0.6


def test_the_default_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command's second half, on real emoji, in two stages, with its pictures."""
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    runner(["train", *SHORT, "lr_scheduler.warmup_steps=1", "run_dir=run"], tmp_path)
    made = record(tmp_path / "run")
    assert made["status"] == "ok"
    assert made["layout"]["pipeline"] == 2
    assert {"samples", "reconstructions", "curve"} <= made["artifacts"].keys()
    assert all((tmp_path / "run" / path).exists() for path in made["artifacts"].values())
