"""A user's own optimizer and compressor, by option files in the working directory: nothing of the runner is changed."""

from __future__ import annotations

from pathlib import Path

import halved_sums
import pytest
import thread_runs
import torch
from thread_runs import result
from torch import Tensor
from user_project import assert_same_weights, make_directory, plain_result

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.errors import Problem
from runner.plan.requested_schedule import executed_schedule
from runner.plan.rules.tables import order_problems

_SIGN_DESCENT = """
import torch
from runner.config.rules.table import Row, Table
from runner.optim.catalogue.kind import OptimizerKind


class SignDescent(torch.optim.Optimizer):
    def __init__(self, parameters, lr, keep):
        super().__init__(parameters, {"lr": lr})
        self.keep = keep

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            mean = state.setdefault("mean", torch.zeros_like(parameter))
            mean.mul_(self.keep).add_(parameter.grad)
            parameter.sub_(self.param_groups[0]["lr"] * mean.sign())


def make(section, parameters):
    return SignDescent(parameters, section.lr, section.momentum)


RULES = Table("Signs", (Row(
    "trainer.grad_clip_norm", lambda c: c.trainer.grad_clip_norm is not None, "is of no use to signs",
    fix="trainer.grad_clip_norm=null",
),))

KIND = OptimizerKind(
    name="sign_descent", description="signs of a running sum", make=make, reads=("momentum",), rules=(RULES,),
    temporaries=2, values=1.0, elementwise=True,
)


def function(parameters, lr, keep=0.5):
    return SignDescent(parameters, lr, keep)
"""


class Plain:
    """The same by hand."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = list(parameters)
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, mean in zip(self.parameters, self.means, strict=True):
            assert parameter.grad is not None
            mean.mul_(0.5).add_(parameter.grad)
            parameter.sub_(2.0**-7 * mean.sign())


def write(directory: Path, option: str, text: str) -> None:
    path = directory / "conf" / f"{option}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = make_directory(tmp_path / "project")
    (directory / "descents.py").write_text(_SIGN_DESCENT, encoding="utf-8")
    (directory / "halves.py").write_text(Path(halved_sums.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    write(directory, "optimizer/mine", "# Signs.\ntarget: descents:KIND\nlr: 0.0078125\nmomentum: 0.5\n")
    write(directory, "optimizer/simple", "# Signs.\ntarget: descents:function\nlr: 0.0078125\n")
    write(directory, "compression/halves", "# In bfloat16.\ntarget: halves:KIND\n")
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(directory)
    return directory


def told(directory: Path, *overrides: str) -> list[Problem]:
    """What is wrong with a request of that directory, in another process's place."""
    config = resolve(["model=mlp", *overrides], working_directory=directory)
    return rules(config)


@pytest.mark.costly
def test_a_users_optimizer_trains_in_two_stages_and_goes_on(project: Path) -> None:
    several = ("optimizer=mine", "parallelism.pipeline=2", "schedule.microbatches=2", "checkpoint.every=2")
    found, whole = result(project, *several, "checkpoint.keep=5", run="whole")
    saved = project / "whole" / "checkpoints" / "step-2.ckpt"
    _, weights = result(project, *several, f"resume={saved}", run="resumed")
    assert_same_weights(weights, whole)
    losses, expected = plain_result(optimizer=Plain, count=2)
    assert_same_weights(whole, expected)
    assert found["loss"] == losses


def test_a_users_kind_has_its_rules_and_its_keys(project: Path) -> None:
    assert told(project, "optimizer=mine") == []
    (problem,) = told(project, "optimizer=mine", "trainer.grad_clip_norm=1.0")
    assert problem.rule == "is of no use to signs"
    (problem,) = told(project, "optimizer=mine", "optimizer.betas=[0.5,0.5]")
    assert problem.path == "optimizer.betas"
    assert "no meaning for mine" in problem.why
    assert told(project, "optimizer=mine", "zero.stage=1", "parallelism.data=2") == []  # elementwise, as it says
    (problem,) = told(project, "optimizer=simple", "zero.stage=1", "parallelism.data=2")
    assert problem.path == "optimizer.name"


def test_a_users_compressor_is_refused_where_it_cannot_work(project: Path) -> None:
    asked = ("compression=halves", "parallelism.data=2")
    assert told(project, *asked) == []
    assert told(project, *asked, "+compression.kwargs.keep=false") == []
    refused: dict[tuple[str, ...], str] = {
        ("parallelism.data=1",): "compression.name",
        ("zero.stage=1",): "zero.stage",
        ("zero.stage=0",): "zero.stage",
        ("optimizer=onebit_adam",): "optimizer.name",
        ("precision=fp16_mixed",): "precision.name",
        ("+compression.kwargs.kep=false",): "compression.kwargs.kep",
        ("+compression.kwargs.keep=7",): "compression.kwargs.keep",
    }
    for more, path in refused.items():
        (problem,) = told(project, *asked, *more)
        assert (problem.path, bool(problem.why), bool(problem.fix)) == (path, True, True)
    (problem,) = told(project, "compression.target=halves:KIND", "parallelism.data=2")
    assert problem.path == "compression.target"
    for name in ("chimera", "pipefb"):
        layout = (f"schedule={name}", "parallelism.pipeline=2", "schedule.microbatches=4")
        config = resolve(["model=mlp", *asked, *layout], working_directory=project)
        (problem,) = order_problems(config, executed_schedule(config), 8, ())
        assert (problem.path, problem.fix) == ("schedule.name", "schedule=1f1b")


def test_verify_says_why_it_cannot_compare(project: Path) -> None:
    words = ("verify", *thread_runs.WORDS, "compression=halves", "parallelism.data=2")
    status, said = thread_runs.told(*words)
    assert status == 2
    assert "compression = halves: must be none here. One process sums whole gradients" in said


@pytest.mark.costly
def test_a_users_compressor_trains_on_two_replicas_and_goes_on(project: Path) -> None:
    """Its leftover is in the checkpoints, and its bytes are in the record."""
    common = ("parallelism.data=2", "checkpoint.every=2", "checkpoint.keep=5", "optimizer=sgd", "optimizer.lr=0.125")
    found, whole = result(project, *common, "compression=halves", run="whole")
    plain_record, unlike = result(project, *common, run="plain")
    assert any(not torch.equal(whole[name], unlike[name]) for name in whole)
    halved, full = (each["bytes_moved"]["weight_gradients"] for each in (found, plain_record))
    assert halved == full / 2 + 8  # and from both replicas whether their gradients are finite
    for more in ((), ("checkpoint.asynchronous=true",)):
        source = f"source{len(more)}"
        result(project, *common, "compression=halves", *more, "trainer.max_steps=2", run=source)
        saved = project / source / "checkpoints" / "step-2.ckpt"
        _, weights = result(project, *common, "compression=halves", f"resume={saved}", run=f"resumed{len(more)}")
        assert_same_weights(weights, whole)
