"""What stands in a batch script: lines of the user's own, names with quotes and line breaks, and ranks that fit.

The script is run by bash with a ``srun`` that only says what it was called with; sbatch's reading of its own lines is
written here once more, after ``_get_argument`` in SLURM's ``src/sbatch/opt.c``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.config.schema import LauncherConfig, RunConfig
from runner.launch.hydra.array import array_problems
from runner.launch.slurm.script import batch_script

SRUN = """#!/bin/bash
printf '%s\\n' "$PWD" "setting=$SETTING" "$@"
"""
NASTY = """it's "a\\b" $(touch broken) `touch broken` #c"""


def script(launcher: LauncherConfig, *, name: str = "run", run_dir: Path = Path("run"), place: Path = Path()) -> str:
    launcher.name = "slurm"
    config = RunConfig(name=name, launcher=launcher)
    return batch_script(config, run_dir, ["rank", "a b"], working_directory=place)


def started(text: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """What the batch script does, where srun is a program that says what it was called with."""
    directory.mkdir(exist_ok=True)
    (directory / "srun").write_text(SRUN)
    (directory / "srun").chmod(0o755)
    environment = {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=False)


def options(text: str) -> list[str]:
    """The options that sbatch reads: the words of the lines that begin with #SBATCH, before the first command."""
    found = []
    for line in text.splitlines()[1:]:
        if not line.startswith("#"):
            break
        rest = line.removeprefix("#SBATCH")
        while rest.strip():
            word, rest = argument(rest)
            found.append(word)
    return found


def argument(line: str) -> tuple[str, str]:
    word, quote, escaped, at = "", "", False, len(line) - len(line.lstrip())
    while at < len(line) and (quote or not line[at].isspace()):
        letter = line[at]
        at += 1
        if escaped:
            word, escaped = word + letter, False
        elif letter == "\\":
            escaped = True
        elif quote and letter == quote:
            quote = ""
        elif not quote and letter in "\"'":
            quote = letter
        elif not quote and letter == "#":
            return word, ""
        else:
            word += letter
    return word, line[at:]


def test_setup_takes_effect_and_the_prefix_stands_before_every_rank(tmp_path: Path) -> None:
    launcher = LauncherConfig(setup=["export SETTING='x y'", "cd /"], prefix="box exec --bind '/a b' image.sif")
    done = started(script(launcher, place=tmp_path), tmp_path)
    assert done.stdout.splitlines() == [
        *("/", "setting=x y", "--kill-on-bad-exit=1"),
        *("box", "exec", "--bind", "/a b", "image.sif", "rank", "a b"),
    ]


@pytest.mark.parametrize("line", ["export SETTING='open", "false", "cat <<END", "( exit 3", "no-such-command --x"])
def test_a_setup_line_that_fails_ends_the_job_and_is_named(line: str, tmp_path: Path) -> None:
    done = started(script(LauncherConfig(setup=[line]), place=tmp_path), tmp_path)
    if line == "cat <<END":  # bash ends such a document with a warning; what follows it is not swallowed
        assert "rank" in done.stdout
        return
    assert done.returncode == 1
    assert f"launcher.setup failed: {line}\n" in done.stderr
    assert "rank" not in done.stdout


def test_names_with_quotes_and_line_breaks_break_nothing(tmp_path: Path) -> None:
    place = tmp_path / (NASTY.replace("/", "") + "\nnew")
    launcher = LauncherConfig(account=NASTY.replace(" ", ""), sbatch=[f"--comment={NASTY}", "--exclusive"])
    run_dir = tmp_path / NASTY
    text = script(launcher, name=f"{NASTY}\ntouch broken", run_dir=run_dir, place=place)
    assert {
        f"--job-name={NASTY} touch broken",
        f"--output={run_dir}/logs/slurm.log",
        f"--account={launcher.account}",
        f"--comment={NASTY}",
        "--exclusive",
    } <= set(options(text))
    done = started(text, place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{place}\n")
    assert not list(tmp_path.rglob("broken"))


def refused(*overrides: str) -> list[str]:
    return [problem.line() for problem in rules(resolve(["model=mlp", "launcher=slurm", *overrides]))]


def test_more_ranks_than_gpus_on_a_node_are_refused() -> None:
    asked = ("launcher.nodes=2", "launcher.gpus_per_node=2", "parallelism.pipeline=8")
    assert refused(*asked, "device=cuda") == [
        "launcher.nodes = 2: must be 4 or more for 8 ranks. Every rank has a GPU of its own: 4 ranks would be on each "
        "node, and a node has 2 GPUs (launcher.gpus_per_node). Try launcher.nodes=4."
    ]
    assert refused(*asked) == refused(*asked, "device=cuda"), "GPUs are asked for"
    assert refused(*asked, "device=cpu") == []
    assert refused(*asked, "device=cuda", "launcher.nodes=4") == []


def test_the_machine_that_is_planned_for_has_so_many_gpus() -> None:
    asked = ("device=cuda", "hardware=a100_80gb", "parallelism.data=16")
    (line,) = refused(*asked)
    assert line.startswith("launcher.nodes = 1: must be 2 or more for 16 ranks.")
    assert "a node has 8 GPUs (hardware=a100_80gb)" in line
    assert refused(*asked, "launcher.nodes=2") == refused(*asked, "launcher.gpus_per_node=16") == []


def test_a_path_with_a_line_break_is_refused() -> None:
    for name, shown in (("a\nb", "a b"), ("a\\b", "a\\b")):
        (line,) = refused(f"run_dir='{name}'")
        assert line.startswith(f"run_dir = {shown}: must have no line break and no backslash.")


def test_setup_that_is_no_line_and_a_prefix_that_is_no_words() -> None:
    told = refused('launcher.setup=[" "]', 'launcher.prefix="it\'s"')
    assert [line.partition(":")[0] for line in told] == ["launcher.setup = [' ']", "launcher.prefix = it's"]


def test_an_array_has_a_gpu_for_every_rank() -> None:
    config = resolve(["model=mlp", "parallelism.pipeline=8", "device=cuda"])
    (problem,) = array_problems({"nodes": 2, "gpus_per_node": 2, "tasks_per_node": 1}, [config])
    assert problem.fix == "hydra.launcher.gpus_per_node=4"
    assert array_problems({"nodes": 2, "gpus_per_node": 4, "tasks_per_node": 1}, [config]) == []
