"""The commands of the page for cluster users are good requests, for as many ranks as they start."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from readme import ROOT

from runner.config.compose.resolve import resolve, resolve_sweep
from runner.config.schema import RunConfig
from runner.launch.hydra.array import array_problems
from runner.launch.hydra.search_settings import search_settings
from runner.launch.hydra.settings import launcher_settings, split_words
from runner.launch.mpi import complete_rank
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
    told += ["RANK=0", "RANK=1", "--standalone", "--nnodes=2"]
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
    settings = launcher_settings(plugins, "run")
    assert settings is not None
    assert array_problems(settings, jobs) == []


def test_a_search() -> None:
    plugins, _ = split_words(request(of("hydra/sweeper=optuna")))
    settings = search_settings(plugins, "run")
    assert (settings.n_trials, settings.sampler_name, settings.sampler) == (8, "tpe", {"seed": 0})


@pytest.mark.full
def test_as_many_ranks_are_started_as_are_asked_for() -> None:
    for line, started in ((of("srun"), 2 * 4), (of("mpirun", "-n", "4"), 4), (of("mpirun", "--host"), 4 + 4)):
        config = resolve(request(line))
        assert num_ranks(config) == started
        check_elsewhere(config)


def test_lines_that_start_one_rank_each() -> None:
    for rank in range(2):
        line = [word for word in of(f"RANK={rank}") if word != "&"]
        variables = dict(word.split("=") for word in line[3 : line.index("runner")])
        assert complete_rank(variables)
        assert num_ranks(resolve(request(line))) == int(variables["WORLD_SIZE"]) == 2


def started_by_torchrun(line: list[str]) -> tuple[int, list[str]]:
    """The ranks that a line starts, by torchrun's own parser, and what follows ``-m runner train``."""
    from torch.distributed.run import config_from_args, get_args_parser

    options = get_args_parser().parse_args(line[1:])
    assert (options.module, options.training_script) == (True, "runner")
    launch, _, words = config_from_args(options)
    assert words[-len(options.training_script_args) :] == options.training_script_args
    assert options.training_script_args[0] == "train"
    assert launch.min_nodes == launch.max_nodes
    return launch.max_nodes * launch.nproc_per_node, options.training_script_args[1:]


def test_torchrun_starts_as_many_ranks_as_are_asked_for() -> None:
    for word, ranks in (("--standalone", 2), ("--nnodes=2", 8)):
        (line,) = [words for words in LINES if words[:1] == ["torchrun"] and word in words]
        started, words = started_by_torchrun(line)
        assert started == num_ranks(resolve(words)) == ranks


@pytest.mark.costly
def test_the_pods_of_a_job_find_one_another_and_start_the_ranks() -> None:
    """Names and numbers of the Service, the Job, torchrun and the request agree."""
    (text,) = re.findall(r"^```yaml kubernetes.yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    service, job = yaml.safe_load(text)["items"]
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    command = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"]]
    assert f"--master-addr={name}-0.{pod['subdomain']}" in command
    started, words = started_by_torchrun(command)
    config = resolve(words)
    assert started == num_ranks(config) == spec["completions"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert config.resume == "auto"
    shared = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "shared")
    assert str(config.run_dir).startswith(shared)
    check_elsewhere(resolve([word for word in words if not word.startswith(("run_dir=", "resume="))]))
