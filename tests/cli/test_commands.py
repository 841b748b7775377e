"""The command line in this process: what is printed, where, and with which status."""

# ruff: noqa: E501 - a row of a table stays in one line

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import __version__
from runner.cli.commands import COMMANDS
from runner.cli.main import main
from runner.config.compose.groups import groups, options, shipped_conf
from runner.config.compose.shape import key_paths
from runner.config.schema import RunConfig

PIPELINE = ["model=gpt", "parallelism.pipeline=4", "schedule.microbatches=8"]


@pytest.fixture(autouse=True)
def _no_handlers_left() -> Iterator[None]:
    """The command puts a handler on the runner's logger, for its own process."""
    log = logging.getLogger("runner")
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.level, log.propagate = handlers, level, propagate


def test_alone_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS.values():
        assert command.summary in " ".join(shown.split())
        assert command.examples[0][0] in shown
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_lists_its_flags_groups_options_and_keys(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    words = set(shown.split())
    command = COMMANDS[name]
    assert all(flag.name in words for flag in command.flags)
    sections = command.sections
    for group in groups():
        if sections is None or group in sections:
            assert group in words
            assert set(options(group, (shipped_conf(),))) <= words
    keys = {word.partition("=")[0] for word in words}
    for path in key_paths():
        section, _, key = path.rpartition(".")
        if (sections is None or section in sections) and key not in ("name", "goes_with"):
            assert path in keys


def test_help_shows_the_options_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("# A model of my own.\ntarget: a:b\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-h"]) == 0
    assert "A model of my own." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["trian"], "command = trian: there is no such command. The commands are train, plan, schedule, verify, evaluate, predict, report, export, doctor, completion. Try runner train."),
        (["help", "trian"], "command = trian: there is no such command. The commands are train, plan, schedule, verify, evaluate, predict, report, export, doctor, completion. Try runner help train."),
        (["model=gpt"], "command = model=gpt: there is no such command. The commands are train, plan, schedule, verify, evaluate, predict, report, export, doctor, completion. Try runner train model=gpt."),
        (["verify", "model=gpt", "--steps", "none"], "--steps = none: must be a whole number, 1 or above. Try --steps 4."),
        (["verify", "model=gpt", "steps=3"], "steps = 3: is a flag of `runner verify`, and no key. Try --steps 3."),
        (["export", "a"], "RUN_DIR FILE = a: must be a run's directory and the file to write."),
        (["export", "a", "b.safetensors"], "RUN_DIR = a: must be a run's directory. There is no such directory."),
        (["export", "a", "b.pt"], "FILE = b.pt: must end in .safetensors. The file is of that format, which `torch.load` does not"),
        (["export", "a", "/nowhere/b.safetensors"], "FILE = /nowhere/b.safetensors: must be a file in a folder that exists. Try b.safetensors."),
        (["doctor", "model=gpt"], "word = model=gpt: is not understood. `runner doctor` takes no overrides."),
        (["schedule", "--jsn"], "flag = --jsn: there is no such flag. `runner schedule` has --cfg, --json, --csv, --svg, --trace, --list. Try --json."),
        (["schedule", "--json=yes"], "--json = yes: takes no value. Try --json."),
        (["schedule", "--csv"], "--csv = null: needs FILE. Try --csv FILE."),
        (["schedule", "--svg", "/nowhere/a.svg"], "--svg = /nowhere/a.svg: must be a file in a folder that exists. Try --svg a.svg."),
        (["train", "-m", "model=gpt", "seed=a,b"], "seed = a: must be a whole number. It is text."),
        (["plan", "-m", "model=gpt", "optimizer=glob(zz)"], "optimizer = glob(zz): nothing matches, so that there is no job."),
        (["report"], "DIR = null: must be the directory of a run or of a sweep, several of them, or a folder of runs. Try runner report outputs."),
    ],
)  # fmt: skip
def test_a_wrong_request_is_told_on_standard_error(
    line: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(told)
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_no_key_or_group_has_the_name_of_a_flag() -> None:
    flags = {flag.name.lstrip("-") for command in COMMANDS.values() for flag in command.flags}
    assert not flags & {*key_paths(), *groups()}


def test_all_problems_of_flags_keys_and_rules_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--jsn", "sede=1", "optimizer=adm"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert main(["schedule", "--jsn", "model=gpt", "seed=-1", "schedule.microbatches=0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_directory_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"DIR = {tmp_path}: must be the directory of a run")


def test_schedule_prints_the_document_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "schedule=1f1b", *PIPELINE, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schedule"], document["ranks"], document["microbatches"]) == ("1f1b", 4, 8)
    assert document["bubble_ratio"] == pytest.approx(3 / 11)
    assert document["actions"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]
    assert document["costs"] == {"F": 1, "B": 2, "I": 1, "W": 1, "comm": 0}


def test_costs_are_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "schedule=gpipe", *PIPELINE, "cost.F=2", "cost.B=5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == (8 + 3) * 7


def test_schedule_of_several_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a barrier zb_h2 idles before its first and after its last step only; a file holds one step."""
    words = ["schedule=zb_h2", "schedule.steps=3", "schedule.post_validation=true", *PIPELINE]
    file = tmp_path / "one.csv"
    assert main(["schedule", *words, "--json", "--csv", str(file)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["microbatches"], document["makespan"]) == (24, 3 * 24 + 3)
    assert document["steady_bubble_ratio"] == pytest.approx(0)
    assert document["versions"]["F"][23] == [2, 2, 2, 2]
    assert main(["schedule", "schedule=from_file", f"schedule.file={file}", *PIPELINE, "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["makespan"], one["steady_bubble_ratio"]) == (27, None)


def test_schedule_draws_text_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {flag: tmp_path / f"order.{flag}" for flag in ("csv", "svg", "trace")}
    flags = [word for flag, file in files.items() for word in (f"--{flag}", str(file))]
    assert main(["schedule", "schedule=gpipe", *PIPELINE, *flags]) == 0
    assert "27.3 %" in capsys.readouterr().out
    assert files["csv"].read_text(encoding="utf-8").startswith("0F0,0F1,")
    assert files["svg"].read_text(encoding="utf-8").startswith("<svg")
    assert json.loads(files["trace"].read_text(encoding="utf-8"))["traceEvents"]
    assert main(["schedule", "schedule=from_file", f"schedule.file={files['csv']}", *PIPELINE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["actions"][0][:2] == ["0F0", "0F1"]


def test_schedule_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in options("schedule", (shipped_conf(),)))


def test_the_list_of_schedules_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert {"zb_v", "gpipe", "from_file"} <= {entry["name"] for entry in entries}
    keys = {
        "name",
        "aliases",
        "kind",
        "data_unit",
        "convergence",
        "description",
        "default_chunks",
        "constraints",
        "formulas",
        "source",
    }
    assert all(set(entry) == keys for entry in entries)


def test_plan_prints_the_document_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=mlp", "device=cpu", "parallelism.pipeline=2", "schedule.microbatches=4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is True
    assert document["problems"] == []
    assert len(document["peak_memory_bytes"]) == 2
    assert (document["tokens_per_step"], document["tokens_per_second"], document["mfu"]) == (None, None, None)
    assert document["samples_per_second"] == pytest.approx(32 / document["step_seconds"])
    assert document["layout"]["world_size"] == 2


@pytest.mark.costly
def test_a_plan_that_does_not_fit_ends_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=mlp", "memory_limit=100kB", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False
    assert document["problems"]


def test_a_wrong_plan_says_so_in_its_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=mlp", "parallelism.pipeline=100", "--json"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["problems"] == shown.err.splitlines()[-1:]


@pytest.mark.costly
def test_a_sweep_of_plans_is_a_list_and_an_unsupported_one_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", "model=mlp", "parallelism.pipeline=2,100", "--json"]) == 0
    two, hundred = json.loads(capsys.readouterr().out)
    assert two["fits"]
    assert two["overrides"] == ["model=mlp", "parallelism.pipeline=2"]
    assert hundred["fits"] is False
    assert hundred["problems"]


def test_train_hands_over_the_checked_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.launch import start
    from runner.launch.sweep import run as sweep

    seen: list[object] = []

    def train(config: RunConfig, *, command: str, begun: float) -> int:
        assert 0 < begun <= time.perf_counter()
        seen.append((config.model.name, command))
        return 75

    def sweep_of(jobs: list[list[str]], *, command: str, plugins: object) -> int:
        seen.append((jobs, command))
        return 1

    monkeypatch.setattr(start, "train", train)
    monkeypatch.setattr(sweep, "sweep", sweep_of)
    assert main(["train", "model=mlp", "name=a b"]) == 75
    assert main(["train", "-m", "model=mlp", "seed=1,2"]) == 1
    assert seen == [
        ("mlp", "runner train model=mlp 'name=a b'"),
        ([["model=mlp", "seed=1"], ["model=mlp", "seed=2"]], "runner train model=mlp seed=1,2 -m"),
    ]


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from runner.launch import start

    def interrupted(*_: object, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "train", interrupted)
    assert main(["train", "model=mlp"]) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"
