"""The commands of the page for cluster users are good requests, for as many ranks as they start."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from readme import ROOT

from runner.config.compose.resolve import resolve, resolve_sweep
from runner.config.schema import RunConfig
from runner.launch.hydra.array import array_problems
from runner.launch.hydra.settings import LAUNCHER, SWEEPER, plugin_settings, split_words
from runner.launch.run.prepare import check_elsewhere
from runner.launch.slurm.script import batch_script

TEXT = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh[^\n]*\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
LINES = [shlex.split(line) for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
TRAINED = [words for words in LINES if "train" in words]


def of(*words: str) -> list[str]:
    (found,) = [line for line in TRAINED if set(words) <= set(line)]
    return found


def request(line: list[str]) -> list[str]:
    """What follows ``runner train``."""
    assert line[line.index("train") - 1] == "runner"
    return line[line.index("train") + 1 :]


def num_ranks(config: RunConfig) -> int:
    return config.parallelism.pipeline * config.parallelism.data * config.parallelism.tensor


def test_every_example_is_looked_at_here() -> None:
    told = ["launcher=slurm", "srun", "hydra/launcher=submitit_slurm", "hydra/sweeper=optuna", "4", "--host"]
    assert [next(word for word in told if word in line) for line in TRAINED] == told


def test_a_job_of_two_nodes() -> None:
    config = resolve(request(of("launcher=slurm")))
    assert (config.launcher.nodes, num_ranks(config)) == (2, 16)
    script = batch_script(config, Path("run"), ["rank"], working_directory=Path.cwd())
    assert "--gpus-per-node=8\n" in script


def test_an_array_of_twelve() -> None:
    plugins, words = split_words(request(of("hydra/launcher=submitit_slurm")))
    jobs = [resolve(job) for job in resolve_sweep([word for word in words if word != "-m"])]
    assert len(jobs) == 12
    settings = plugin_settings(LAUNCHER, plugins, "run")
    assert settings is not None
    assert array_problems(settings, jobs) == []


def test_a_search() -> None:
    plugins, _ = split_words(request(of("hydra/sweeper=optuna")))
    settings = plugin_settings(SWEEPER, plugins, "run")
    assert settings is not None
    assert settings["n_trials"] == 8


@pytest.mark.slow
def test_as_many_ranks_are_started_as_are_asked_for() -> None:
    for line, started in ((of("srun"), 2 * 4), (of("mpirun", "-n", "4"), 4), (of("mpirun", "--host"), 4 + 4)):
        config = resolve(request(line))
        assert num_ranks(config) == started
        check_elsewhere(config)
