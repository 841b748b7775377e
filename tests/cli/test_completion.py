"""Completion of command lines, asked for as bash asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli.commands import COMMANDS
from runner.cli.completion import completions, script
from runner.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
# As readline does: the words of the line are taken apart at = and :, too, and the last one is completed.
ASK = """
{script}
runner() {{ {python} -m runner "$@"; }}
line={line!r}
export COMP_LINE="$line" COMP_POINT=${{#line}}
last="${{line##*[ =:]}}"
runner completion runner "$last" before
"""


def completed(line: str, directory: Path, word: str | None = None) -> list[str]:
    return completions(line, word, directory)


def test_commands_and_help(tmp_path: Path) -> None:
    assert completed("runner pl", tmp_path) == ["plan "]
    assert completed("runner ", tmp_path) == [f"{name} " for name in (*COMMANDS, "help")]
    assert completed("runner help ex", tmp_path) == ["export "]
    assert completed("runner nothing x", tmp_path) == []


def test_groups_sections_and_keys(tmp_path: Path) -> None:
    assert completed("runner train sche", tmp_path) == ["schedule=", "schedule."]
    assert completed("runner train schedule.micro", tmp_path) == ["schedule.microbatches="]
    assert completed("runner train se", tmp_path) == ["seed="]
    assert completed("runner schedule opt", tmp_path) == [], "it draws without an optimizer"
    assert completed("runner report see", tmp_path) == [], "it takes no overrides"


def test_flags(tmp_path: Path) -> None:
    assert completed("runner plan --w", tmp_path) == ["--why ", "--write "]
    assert completed("runner plan model=gpt --he", tmp_path) == ["--help "]


def test_options_also_a_users_own(tmp_path: Path) -> None:
    (tmp_path / "conf" / "schedule").mkdir(parents=True)
    (tmp_path / "conf" / "schedule" / "gpipe_mine.yaml").write_text("target: mine:order\n")
    assert completed("runner train schedule=gp", tmp_path) == ["schedule=gpipe ", "schedule=gpipe_mine "]
    assert completed("runner train schedule=gp", tmp_path, "gp") == ["gpipe ", "gpipe_mine "]
    assert completed("runner train compile=", tmp_path, "") == ["true ", "false "]


def test_the_end_of_the_line_is_where_the_cursor_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", "runner tra seed=1")
    monkeypatch.setenv("COMP_POINT", "10")
    assert main(["completion", "runner", "tra", "runner"]) == 0
    assert capsys.readouterr().out == "train \n"


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err == "SHELL = tcsh: must be bash or zsh. Try runner completion bash.\n"
    assert main(["train", "--shell-completion", "install=bash"]) == 2
    assert "Try runner completion bash." in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_takes_the_script(tmp_path: Path) -> None:
    def asked(line: str) -> list[str]:
        text = ASK.format(script=script("bash"), python=sys.executable, line=line)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    assert asked("runner train schedule=zb_h") == ["zb_h1 ", "zb_h2 "]
    assert asked("runner train optimizer.l") == ["optimizer.lr="]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", name]) == 0
    asked = capsys.readouterr().out
    assert " ".join(asked.split()).startswith(f"runner {name}: {COMMANDS[name].summary} Usage: ")
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out == asked


def test_help_of_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "plann"]) == 2
    assert "Try runner help plan." in capsys.readouterr().err
    assert main(["help"]) == 0
    assert "runner help COMMAND" in capsys.readouterr().out
