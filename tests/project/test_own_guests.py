"""A user's own schedule, optimizer, checkpointing policy and compressor together, from one folder of theirs.

The folder has a module and four option files; nothing of the runner is changed, and the module imports nothing of it.
docs/design.md says how each is written.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch import nn
from torch.nn import functional

from runner.config.compose.resolve import resolve
from runner.optim.catalogue.registry import optimizer_of
from runner.plan.requested_schedule import schedule_of, schedule_problems
from runner.schedule import build, check, check_program, lower, problems_of
from runner.schedule.kinds import ScheduleRequest

ROOT = Path(__file__).resolve().parents[2]

MODULE = '''
import torch


def pairs(ranks, microbatches, size=2):
    """Some micro-batches go forward, then back, then the next ones."""
    rows = []
    for rank in range(ranks):
        row = []
        for first in range(0, microbatches, size):
            group = range(first, min(first + size, microbatches))
            row += [f"{rank}F{m}" for m in group] + [f"{rank}B{m}" for m in group]
        rows.append(row)
    return rows


def turned(ranks, microbatches):
    """The first stage is on the last rank, and each other one on the rank before its own."""
    stages = [*range(1, ranks), 0]
    return [[f"{stage}{op}{m}" for op in "FB" for m in range(microbatches)] for stage in stages]


def backwards_first(ranks, microbatches):
    return [[f"{rank}B0", f"{rank}F0"] for rank in range(ranks)]


class Signs(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


def signs(parameters, lr):
    return Signs(parameters, lr)


def half(chain):
    from runner.memory.solve.values import Segment

    middle = (chain.first + chain.last) // 2
    rest = [Segment(middle + 1, chain.last)] if middle < chain.last else []
    return [Segment(chain.first, middle, recompute=True), *rest]


class Sums:
    """Plain sums."""

    def __init__(self, gradients):
        pass

    def start(self, gradients, transport, group):
        return [transport.all_reduce(flat, group) for flat in gradients.flats]

    def settle(self, applied):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def sums(gradients):
    return Sums(gradients)
'''
OPTIONS = {
    "schedule": "target: toys:pairs\nkwargs:\n  size: 2\n",
    "optimizer": "target: toys:signs\nlr: 0.01\n",
    "activation_checkpoint": "target: toys:half\n",
    "compression": "target: toys:sums\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the module and an option ``toy`` of each group."""
    (tmp_path / "toys.py").write_text(MODULE, encoding="utf-8")
    for group, text in OPTIONS.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "toy.yaml").write_text(f"# A toy of one's own.\n{text}", encoding="utf-8")
    return tmp_path


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return warm.run([sys.executable, "-m", "runner", *words], cwd=folder, env=environment, timeout=250)


def test_a_schedule_of_ones_own_is_drawn_and_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    schedule = build("mine", ranks=3, microbatches=5, target="toys:pairs", kwargs={"size": 2})
    assert (schedule.name, schedule.ranks, schedule.microbatches) == ("mine", 3, 5)
    assert check(schedule) == []
    assert check_program(lower(schedule)) == []
    assert [str(action) for action in schedule.actions[1][:4]] == ["1F0", "1F1", "1B0", "1B1"]


@pytest.mark.parametrize(
    ("target", "kwargs", "said"),
    [
        ("toys:backwards_first", {}, "rank 0, cell 0 (0B0): must come after 0F0 (cell 1)"),
        ("toys:pairs", {"sise": 2}, "Calling it raised TypeError"),
        ("toys:nothing", {}, "must name a function or ScheduleSpec of that module"),
        ("toys:sums", {}, "must run with the arguments that it is given"),
        ("nowhere:pairs", {}, "must name a module that imports"),
    ],
)
def test_a_wrong_schedule_of_ones_own_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, kwargs: dict[str, object], said: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("toys", None)
    problem = problems_of("mine", ranks=2, microbatches=1, target=target, kwargs=kwargs)[0]
    assert problem.path == "schedule.target"
    assert said in problem.line()


def reference(steps: int) -> list[float]:
    """Sign descent in one process over the same samples: the losses of the run below."""
    from runner.zoo.data import random_regression
    from runner.zoo.mlp import build as build_mlp

    torch.manual_seed(0)
    model: nn.Sequential = build_mlp(inputs=32, outputs=8, width=16, layers=4)
    train, _ = random_regression(samples=64, val_samples=8, inputs=32, outputs=8, seed=0)
    inputs, targets = (torch.stack(column) for column in zip(*(train[i] for i in range(16 * steps)), strict=True))
    losses = []
    for step in range(steps):
        batch = slice(16 * step, 16 * (step + 1))
        sums: list[Any] = []
        for replica in range(2):
            own = slice(8 * replica, 8 * replica + 8)
            for given, wanted in zip(
                inputs[batch][own].tensor_split(4), targets[batch][own].tensor_split(4), strict=True
            ):
                loss = functional.mse_loss(model(given), wanted) * len(given)
                loss.backward()  # type: ignore[no-untyped-call]
                sums.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.01 * parameter.grad.sign())
                parameter.grad = None
        losses.append(sum(sums) / 16)
    return losses


@pytest.mark.costly
def test_the_first_stage_may_be_on_any_rank(folder: Path) -> None:
    """Rank 0 has neither end of the pipeline here, and so no data; a rank that has it counts the samples for all."""
    (folder / "conf" / "schedule" / "turned.yaml").write_text("# Turned by one rank.\ntarget: toys:turned\n")
    words = ["model=mlp", "parallelism.pipeline=3", "schedule=turned", "schedule.microbatches=4", "run_dir=run"]
    verified = command(folder, "verify", *words, "--steps", "2")
    assert verified.returncode == 0, verified.stderr
    assert "equal bit for bit over 2 steps" in verified.stdout + verified.stderr
    trained = command(folder, "train", *words, "trainer.max_steps=2", "logger=none")
    assert trained.returncode == 0, trained.stderr
    assert json.loads((folder / "run" / "record.json").read_text())["steps"] == 2


@pytest.mark.costly
def test_all_four_run_together(folder: Path) -> None:
    """Drawn, planned and trained: two stages, two replicas."""
    layout = ["parallelism.pipeline=2", "schedule=toy", "schedule.microbatches=4"]
    drawn = command(folder, "schedule", *layout)
    assert drawn.returncode == 0, drawn.stderr
    assert "\nr0   |01..." in drawn.stdout
    toys = [f"{group}=toy" for group in OPTIONS if group != "schedule"]
    model = [
        "model=mlp",
        "model.kwargs.width=16",
        "model.kwargs.layers=4",
        "data.kwargs.samples=64",
        "data.shuffle=false",
    ]
    asked = [*layout, *toys, *model, "parallelism.data=2", "data.batch_size=16", "data.kwargs.val_samples=8"]
    planned = command(folder, "plan", *asked, "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["fits"] is True
    trained = command(folder, "train", *asked, "trainer.max_steps=4", "logger=none", "run_dir=run")
    assert trained.returncode == 0, trained.stderr
    record = json.loads((folder / "run" / "record.json").read_text(encoding="utf-8"))
    assert record["status"] == "ok"
    assert record["loss"] == pytest.approx(reference(4), rel=1e-5)
    assert record["bytes_moved"]["weight_gradients"] > 0


def test_the_documents_own_schedule_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/design.md's module and option file, as a reader would copy them; and its generator as it stands there."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:python|yaml)\b[^\n]*\n(.*?)```", text, re.DOTALL)
    module, option, optimizer, its_option, generator, _ = blocks
    (tmp_path / "mine.py").write_text(f"{module}\n{optimizer}", encoding="utf-8")
    (tmp_path / "conf" / "schedule").mkdir(parents=True)
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    (tmp_path / "conf" / "optimizer" / "signs.yaml").write_text(its_option, encoding="utf-8")
    (tmp_path / "conf" / "schedule" / "pairs.yaml").write_text(option, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = resolve(["schedule=pairs", "optimizer=signs", "parallelism.pipeline=3", "schedule.microbatches=6"])
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([2.0, -3.0])
    optimizer_of(config.optimizer).make(config.optimizer, [weight]).step()
    assert weight.tolist() == pytest.approx([0.99, 1.01])
    assert schedule_problems(config) == []
    own = schedule_of(config)
    assert (own.name, own.ranks, own.microbatches) == ("pairs", 3, 6)
    shipped: dict[str, Any] = {}
    exec(generator, shipped)
    assert shipped["SPEC"].generate(ScheduleRequest(ranks=3, microbatches=6)).actions == own.actions
