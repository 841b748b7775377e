"""What SLURM is told, and what its variables tell: plain text, without a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.config.schema import LauncherConfig, ParallelismConfig, RunConfig
from runner.errors import DoesNotFitError, RequestError
from runner.launch.run.prepare import prepare
from runner.launch.slurm.script import batch_script
from runner.launch.slurm.step import Step, current_step, tasks_per_node
from runner.launch.slurm.submit import print_script
from runner.launch.start import train
from runner.launch.sweep.run import sweep
from runner.launch.verify import verify

SLURM = ("model=mlp", "launcher=slurm")
VARIABLES = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_a_dry_run_prints_the_script_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {
        "time_limit": "1:30:00",
        "partition": "high",
        "account": "lab",
        "gpus_per_node": "2",
        "cpus_per_task": "3",
        "signal_seconds": "45",
        "requeue": "false",
        "sbatch": '["--mem=0","--exclusive"]',
    }
    overrides = [f"launcher.{key}={value}" for key, value in asked.items()]
    config = resolve([*SLURM, "launcher.nodes=2", "parallelism.pipeline=4", "name=my run", *overrides])
    assert print_script(config) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "#!/bin/bash"
    options = {line.removeprefix("#SBATCH ") for line in printed if line.startswith("#SBATCH")}
    assert options >= {
        *('--job-name="my run"', "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=3", "--gpus-per-node=2"),
        *("--time=1:30:00", "--partition=high", "--account=lab", "--signal=USR1@45", "--no-requeue"),
        *("--mem=0", "--exclusive", "--open-mode=append"),
    }
    assert printed[-1].startswith("exec srun --kill-on-bad-exit=1 ")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_checks_the_request() -> None:
    with pytest.raises(RequestError, match=re.escape("launcher.nodes = 3: must divide the number of ranks, 2")):
        print_script(resolve([*SLURM, "launcher.nodes=3", "parallelism.pipeline=2"]))
    with pytest.raises(DoesNotFitError, match="memory_limit"):
        print_script(resolve([*SLURM, "memory_limit=1000"]))


def test_gpus_follow_from_the_device() -> None:
    config = resolve([*SLURM, "device=cuda", "launcher.nodes=2", "parallelism.data=8"])
    script = batch_script(config, Path("/shared/100%/run"), ["true"], working_directory=Path("/shared/a b"))
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert '#SBATCH --output="/shared/100%%/run/logs/slurm.log"\n' in script
    assert "cd '/shared/a b' || exit 1\n" in script


def test_a_login_node_without_a_gpu_submits_for_those_that_have_some(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cuda = ("device=cuda", "parallelism.pipeline=2")
    assert print_script(resolve([*SLURM, *cuda, "hardware=a100_80gb"])) == 0
    assert "#SBATCH --gpus-per-node=2\n" in capsys.readouterr().out
    with pytest.raises(RequestError, match=r"hardware = auto: must name the machine .* Try hardware=a100_80gb\."):
        print_script(resolve([*SLURM, *cuda]))
    for hardware in ("auto", "a100_80gb"):
        with pytest.raises(RequestError, match=r"device = cuda: must be another on this machine\..* Try device=cpu\."):
            prepare(resolve(["model=mlp", *cuda, f"hardware={hardware}"]))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["launcher.nodes=0"], "launcher.nodes = 0: must be at least 1."),
        (["launcher.time_limit=soon"], "launcher.time_limit = soon: must be minutes or [days-]hours:minutes:seconds."),
        (["launcher.partition='a b'"], "launcher.partition = a b: must be one word."),
        (
            ["launcher.sbatch=[mem]"],
            "launcher.sbatch = mem: each must be one option of sbatch, --name or --name=value.",
        ),
        (['launcher.sbatch=["--time=3"]'], "launcher.sbatch = --time=3: --time follows from launcher.time_limit."),
        (["launcher.max_restarts=-1"], "launcher.max_restarts = -1: must be at least 0."),
        (
            ["launcher.name=local", "launcher.nodes=null", "launcher.wait=true"],
            "launcher.wait = true: belongs to launcher=slurm.",
        ),
    ],
)
def test_rules(overrides: list[str], said: str) -> None:
    (line,) = (problem.line() for problem in rules(resolve([*SLURM, *overrides])))
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("text", "tasks"), [("2(x2)", (2, 2)), ("4", (4,)), ("2(x2),1", (2, 2, 1)), ("3,1(x2)", (3, 1, 1))]
)
def test_tasks_of_each_node(text: str, tasks: tuple[int, ...]) -> None:
    assert tasks_per_node(text) == tasks


def test_a_task_becomes_a_rank() -> None:
    step = current_step(VARIABLES)
    assert step is not None
    assert step.line(RunConfig(parallelism=ParallelismConfig(pipeline=4))) == (
        "SLURM job 17: 2 x 2 ranks on gpu[07-08]; the plan: pipeline 4 x data 1 x tensor 1"
    )
    environment: dict[str, str] = {}
    step.become_rank(environment)
    shared = {"MASTER_ADDR": "gpu07", "MASTER_PORT": environment["MASTER_PORT"]}
    assert environment.items() >= {
        *shared.items(),
        *{"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items(),
    }
    again = current_step(VARIABLES | {"SLURM_RESTART_COUNT": "1"})
    assert again is not None
    assert again.place == step.place == "17.0"
    restarted: dict[str, str] = {}
    again.become_rank(restarted)
    assert restarted["MASTER_PORT"] != environment["MASTER_PORT"], "the last start may still hold it"


def test_a_batch_script_itself_is_no_task() -> None:
    assert current_step({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0"}) is None


def test_a_task_of_an_array() -> None:
    step = current_step(VARIABLES | {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "5"})
    assert step is not None
    assert step.job == "12_5"


@pytest.mark.parametrize(
    ("tasks", "nodes", "rule"),
    [
        ((2, 2), None, None),
        ((2, 1), None, "every node must run as many ranks"),
        ((2, 2), 1, "must be 2"),
        ((2, 2), 2, None),
    ],
)
def test_layouts_that_no_plan_has(tasks: tuple[int, ...], nodes: int | None, rule: str | None) -> None:
    step = Step("1", "0", 0, 0, 0, 0, "n[1-2]", tasks)
    config = RunConfig(launcher=LauncherConfig(name="slurm" if nodes else "local", nodes=nodes))
    assert [problem.rule for problem in step.problems(config)] == ([rule] if rule else [])


def test_commands_that_submit_nothing_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="launcher = slurm: must be local"):
        verify(resolve([*SLURM]))
    with pytest.raises(RequestError, match=r"launcher.dry_run = true: belongs to a single run"):
        sweep([[*SLURM, "launcher.dry_run=true"]], command="runner train")
    assert list(tmp_path.iterdir()) == []


def test_without_slurm_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match="launcher = slurm: needs sbatch. It is not on the PATH"):
        train(resolve([*SLURM]), command="runner train")
    assert list(tmp_path.iterdir()) == []
