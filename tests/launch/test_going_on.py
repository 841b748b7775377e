"""A run that was stopped says how it continues, and so does a request that meets its directory."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import get_args

import pytest

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.errors import RequestError, override_word
from runner.launch.local.ranks import stopped_by_another, stopped_early
from runner.launch.run.directory import last_run, run_directory_problems, taken_directory
from runner.launch.run.going_on import command_that_continues
from runner.launch.run.resume import with_checkpoint
from runner.record import RunRecord, Status


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _record(directory: Path, status: Status) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    RunRecord(status=status, steps=7, command="runner train").save(directory)


def test_the_command_that_continues_is_whole(tmp_path: Path) -> None:
    command = "runner train model=gpt run_dir=outputs/a resume=outputs/b/step-3.ckpt 'model.kwargs={a: 1}'"
    whole = "runner train model=gpt 'model.kwargs={a: 1}' run_dir=outputs/a resume=auto"
    assert command_that_continues(command, tmp_path / "outputs" / "a") == whole
    assert command_that_continues("runner train", Path("/elsewhere")) == "runner train run_dir=/elsewhere resume=auto"


def test_a_sweep_continues_in_its_directory_without_resume(tmp_path: Path) -> None:
    command = "runner train model=mlp optimizer.lr=1e-3,1e-2 -m"
    assert command_that_continues(command, tmp_path / "sw") == f"{command} run_dir=sw"


def test_what_was_started_as_a_module_continues_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/a/runner/__main__.py", "train"])
    assert command_that_continues("runner train", tmp_path / "a").startswith("python -m runner train run_dir=a ")


NAMES = ("a b, c", "lr=1e-3", "(old) [1] {2}", "über", 'a"b', "it's", "a\\", 'a\\"b', "null", "a:b", " a ", "~a#b!c;d")


def test_a_directory_of_any_name_can_be_typed() -> None:
    """Each as the value of an argument of the model, so that one request tells all."""
    words = [override_word(f"+model.kwargs.name{at}", name) for at, name in enumerate(NAMES)]
    kwargs = resolve(["model=mlp", *words]).model.kwargs
    assert tuple(kwargs[f"name{at}"] for at in range(len(NAMES))) == NAMES
    assert resolve(["model=mlp", override_word("run_dir", "2026")]).run_dir == "2026"


@pytest.mark.parametrize("name", NAMES)
def test_advice_with_a_directory_of_any_name_can_be_typed(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    _record(directory, "ok")
    problem = taken_directory(directory)
    assert problem is not None
    (word,) = shlex.split(problem.fix)
    assert resolve(["model=mlp", word]).run_dir == f"{directory}_again"


def test_an_override_that_cannot_be_read_is_advised_in_quotes() -> None:
    with pytest.raises(RequestError) as refused:
        resolve(["model=mlp", "run_dir=it's (a)=b,c"])
    (word,) = shlex.split(refused.value.problems[0].fix)
    assert resolve(["model=mlp", word]).run_dir == "it's (a)=b,c"


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (2, "stopped by SIGINT (Ctrl-C), saved after step 7; resume=auto continues"),
        (15, "stopped by SIGTERM, saved after step 7; resume=auto continues"),
    ],
)
def test_a_stopped_run_says_where_it_saved(tmp_path: Path, number: int, reason: str) -> None:
    _record(tmp_path / "run", "interrupted")
    assert stopped_early(tmp_path / "run", number).reason == reason
    assert stopped_by_another(f"stopped by SIGTERM,{reason.partition(',')[2]}", number) == reason


@pytest.mark.parametrize("status", get_args(Status))
def test_the_directory_of_a_run_that_is_not_complete_offers_to_continue(status: Status) -> None:
    _record(Path("run"), status)
    (problem,) = run_directory_problems("run", "run")
    assert problem.fix == ("run_dir=run_again" if status == "ok" else "resume=auto")


def test_the_directory_of_a_sweep_offers_another_one() -> None:
    _record(Path("sweep/0"), "failed")
    (problem,) = run_directory_problems("run", "sweep")
    assert problem.fix == "run_dir=sweep_again"


def test_resume_auto_without_a_directory_says_that_it_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    config = RunConfig(name="demo", resume="auto")
    with caplog.at_level(logging.WARNING, "runner"):
        assert with_checkpoint(config).resume is None
        _record(Path("outputs/demo/2026-01-02_00-00-00"), "interrupted")
        assert last_run("demo") == Path("outputs/demo/2026-01-02_00-00-00")
        assert with_checkpoint(config).resume is None
    anew = "resume=auto without run_dir: the run starts anew, in a new directory"
    continues = "; run_dir=outputs/demo/2026-01-02_00-00-00 continues the last run of this name"
    assert caplog.messages == [anew, anew + continues]
