"""A user's own schedule, optimizer, checkpointing policy and compressor together, from one folder of theirs.

Beside them a prediction of weights and strategies for activations and weights in the host's memory, each in a run. The
folder has a module and seven option files; nothing of the runner is changed, and the module imports nothing of it.
docs/design.md says how each is written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm
from documents import blocks, write_files
from oracles import SCALARS
from torch import nn
from torch.nn import functional

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.engine.transport.alone import AloneTransport
from runner.errors import RequestError
from runner.optim.catalogue.prediction import Moment, OwnFormula
from runner.optim.catalogue.registry import compression_of, optimizer_of
from runner.optim.compression.rounds import Turn
from runner.optim.learning_rate import learning_rate, peak_rate
from runner.plan.requested_schedule import schedule_of, schedule_problems
from runner.schedule import build, check, check_program, lower, problems_of
from runner.schedule.kinds import ScheduleRequest

ROOT = Path(__file__).resolve().parents[2]
DESIGN = blocks("docs/design.md")

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


def no_sums(gradients, share=1.0):
    return 3


def every_second(stage, first=0):
    """What every second layer saves is moved."""
    return stage.indices[first::2]


def largest(stage, share):
    """The weights of the largest layers are at home in the host's memory."""
    units = sorted(stage.units, key=lambda unit: unit.home_bytes, reverse=True)
    return units[: round(share * len(units))]


def ahead(moment, steps=1.0):
    """The momentum goes on for a part of the gap."""
    return moment.weight - steps * moment.gap * moment.rate * moment.state["momentum_buffer"]


def others(stage):
    return [99]


def in_place(moment):
    return moment.weight.sub_(1)


def forgotten(stage):
    """It has no return."""
'''
OPTIONS = {
    "schedule": "target: toys:pairs\nkwargs:\n  size: 2\n",
    "optimizer": "target: toys:signs\nlr: 0.01\n",
    "activation_checkpoint": "target: toys:half\n",
    "compression": "target: toys:sums\n",
}
BESIDE = {
    "offload/seconds": "activations: seconds\ntarget: toys:every_second\n",
    "offload/largest": "weights: largest\ntarget: toys:largest\nkwargs:\n  share: 0.5\n",
    "weight_prediction/ahead": "target: toys:ahead\n",
}
LAYOUT = ("model=mlp", "parallelism.pipeline=2", "schedule.microbatches=4")
EVENLY = ("parallelism=auto", "parallelism.ranks=4", "planner=evenly", "data.batch_size=16")
NO_SUMS = ("compression=toy", "compression.target=toys:no_sums", "parallelism.data=2")
MOMENTUM = ("optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.05")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the module and an option ``toy`` of each group."""
    (tmp_path / "toys.py").write_text(MODULE, encoding="utf-8")
    for group, text in OPTIONS.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "toy.yaml").write_text(f"# A toy of one's own.\n{text}", encoding="utf-8")
    for option, text in BESIDE.items():
        (tmp_path / "conf" / option).parent.mkdir(exist_ok=True)
        (tmp_path / "conf" / f"{option}.yaml").write_text(f"# Another one.\n{text}", encoding="utf-8")
    return tmp_path


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return warm.run([sys.executable, "-m", "runner", *words], cwd=folder, env=environment, timeout=1500)


@pytest.mark.parametrize("group", OPTIONS)
def test_an_option_without_a_name_is_named_as_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    monkeypatch.chdir(folder)
    assert getattr(resolve([f"{group}=toy"]), group).name == "toy"


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


def planned(folder: Path, *words: str) -> dict[str, Any]:
    done = command(folder, "plan", *LAYOUT, *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.costly
def test_layers_of_ones_own_choice_are_moved(folder: Path) -> None:
    """The layers of both halves together move what all layers do."""
    halves = (planned(folder, "offload=seconds", f"offload.kwargs.first={first}") for first in (0, 1))
    moved = [each["bytes_moved"]["host_activations"] for each in halves]
    assert min(moved) > 0
    assert sum(moved) == planned(folder, "offload=activations_async")["bytes_moved"]["host_activations"]


@pytest.mark.costly
def test_weights_of_ones_own_choice_are_in_the_host(folder: Path) -> None:
    """Each stage of four linear maps, of which the first and the last of the model are smaller, has two there."""
    found = planned(folder, "offload=largest", "partition=uniform", "model.kwargs.layers=8", "model.kwargs.width=64")[
        "host_weights"
    ]
    assert [[each["layers"] for each in stage] for stage in found] == [[[1, 1], [2, 2]], [[4, 4], [5, 5]]]


@pytest.mark.costly
@pytest.mark.parametrize(
    "words",
    [
        ("offload=seconds",),
        ("offload=largest",),
        ("weight_prediction=ahead", "weight_prediction.gap=1", *MOMENTUM),
        ("weight_prediction=ahead", "schedule=ampnet", *MOMENTUM),
    ],
    ids=["activations", "weights", "prediction", "prediction of late gradients"],
)
def test_a_run_with_a_choice_of_ones_own_is_equal_and_as_large_as_planned(folder: Path, words: tuple[str, ...]) -> None:
    verified = command(folder, "verify", *LAYOUT, *words, "--steps", "3")
    assert verified.returncode == 0, verified.stderr
    assert "equal bit for bit over 3 steps" in verified.stdout + verified.stderr
    trained = command(folder, "train", *LAYOUT, *words, "trainer.max_steps=3", "logger=none", "run_dir=run")
    assert trained.returncode == 0, trained.stderr
    peaks = json.loads((folder / "run" / "record.json").read_text())["peak_memory_bytes"]
    assert min(most - held for most, held in zip(peaks["predicted"], peaks["measured"], strict=True)) >= -SCALARS


def with_lookahead(steps: int, share: float) -> list[float]:
    """SGD's losses where every gradient is taken at weights that the momentum carries on for a part of a step."""
    from runner.zoo.data import random_regression
    from runner.zoo.mlp import build as build_mlp

    torch.manual_seed(0)
    model: nn.Sequential = build_mlp(inputs=32, outputs=8, width=16, layers=4)
    train, _ = random_regression(samples=64, val_samples=8, inputs=32, outputs=8, seed=0)
    inputs, targets = (torch.stack(column) for column in zip(*(train[i] for i in range(16 * steps)), strict=True))
    momenta, losses = [torch.zeros_like(each) for each in model.parameters()], []
    for step in range(steps):
        batch = slice(16 * step, 16 * (step + 1))
        kept = [each.detach().clone() for each in model.parameters()]
        with torch.no_grad():
            for weight, momentum in zip(model.parameters(), momenta, strict=True):
                weight.sub_(share * 0.05 * momentum)
        loss = functional.mse_loss(model(inputs[batch]), targets[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for weight, was, momentum in zip(model.parameters(), kept, momenta, strict=True):
                assert weight.grad is not None
                weight.copy_(was.sub_(0.05 * momentum.mul_(0.9).add_(weight.grad)))
                weight.grad = None
        losses.append(loss.item())
    return losses


@pytest.mark.costly
def test_gradients_are_taken_at_weights_of_ones_own_prediction(folder: Path) -> None:
    model = ["model.kwargs.width=16", "model.kwargs.layers=4", "data.kwargs.samples=64", "data.kwargs.val_samples=8"]
    asked = [*LAYOUT, *model, *MOMENTUM, "data.shuffle=false", "data.batch_size=16", "logger=none", "run_dir=run"]
    own = ["weight_prediction=ahead", "weight_prediction.gap=1", "weight_prediction.kwargs.steps=0.5"]
    trained = command(folder, "train", *asked, *own, "trainer.max_steps=4")
    assert trained.returncode == 0, trained.stderr
    losses = json.loads((folder / "run" / "record.json").read_text())["loss"]
    assert losses == pytest.approx(with_lookahead(4, 0.5), rel=1e-5)
    assert losses != pytest.approx(with_lookahead(4, 0.0), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["offload.target=toys:every_second"],
            "offload.target = toys:every_second: must be named by offload.activations, or by offload.weights.",
        ),
        (
            ["offload.target=toys:nothing", "offload.weights=mine"],
            "offload.target = toys:nothing: must name a function or WeightStrategy of that module.",
        ),
        (["offload.activations=mine"], "offload.activations = mine: must be one of none, save_on_cpu, async, "),
        (["offload.kwargs.first=1"], "offload.kwargs = {'first': 1}: belong to a target."),
        (
            ["offload.target=toys:others", "offload.activations=mine"],
            "offload.target = toys:others: must return a list of some of the stage's layers. It returned 99.",
        ),
        (
            ["offload.target=toys:forgotten", "offload.activations=mine"],
            "offload.target = toys:forgotten: must return a list of some of the stage's layers. It returned None.",
        ),
        (
            ["offload.target=toys:forgotten", "offload.weights=mine"],
            "offload.target = toys:forgotten: must return a list of some of the stage's units. It returned None.",
        ),
        (
            ["offload=seconds", "offload.kwargs.last=1"],
            "offload.target = toys:every_second: must run with the arguments that it is given. Calling it raised",
        ),
        (
            ["weight_prediction.target=toys:nothing"],
            "weight_prediction.target = toys:nothing: must name a function or PredictionKind of that module.",
        ),
        (
            ["weight_prediction=ahead", "weight_prediction.kwargs.share=1", "weight_prediction.gap=1", *MOMENTUM],
            "weight_prediction.kwargs = {'share': 1}: must be arguments of toys:ahead. Got an unexpected keyword",
        ),
        (
            ["weight_prediction=momentum", "weight_prediction.target=toys:ahead", "weight_prediction.gap=1", *MOMENTUM],
            "weight_prediction.target = toys:ahead: belongs to a prediction of your own. momentum is one",
        ),
        (["weight_prediction.kwargs.share=1"], "weight_prediction.kwargs = {'share': 1}: belong to a target."),
        (
            ["weight_prediction=ahead", "weight_prediction.target=toys:in_place", "weight_prediction.gap=1", *MOMENTUM],
            "weight_prediction.target = toys:in_place: must leave the weight as it is. It changed the newest values",
        ),
        (
            ["weight_prediction=ahead", "weight_prediction.gap=1", "optimizer=adamw"],
            "weight_prediction.target = toys:ahead: must run with the arguments that it is given. Calling it raised "
            "KeyError: 'momentum_buffer'",
        ),
        (
            [*NO_SUMS, "compression.kwargs.shar=1"],
            "compression.kwargs = {'shar': 1}: must be arguments of toys:no_sums. Got an unexpected keyword argument "
            "'shar'. Try compression.kwargs.share=1.",
        ),
        (
            [*NO_SUMS, "compression.kwargs.share=1"],
            "compression.target = toys:no_sums: must return a Reducer (runner.engine.update.reducer). It returned a "
            "value of the class int, which has no start, settle, state_dict, load_state_dict.",
        ),
    ],
)
def test_a_wrong_choice_of_ones_own_is_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("toys", None)
    assert main(["plan", *LAYOUT, *words]) == 2
    *_, line = capsys.readouterr().err.splitlines()  # after what tells of long work, on a busy machine
    assert line.startswith(said)


@pytest.mark.parametrize("own", [*(f"{group}=toy" for group in OPTIONS), *(each.replace("/", "=") for each in BESIDE)])
def test_another_mistake_is_told_beside_a_choice_of_ones_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("toys", None)
    assert main(["plan", "model=mlp", own, "nosuch=1"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("nosuch = 1: there is no such key.")
    assert "toys" not in told
    assert "Error" not in told


def test_a_prediction_that_changes_the_weights_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("toys", None)
    moment = Moment(torch.ones(2), {}, {}, None, gap=1, rate=0.1, rates=(0.1,))
    with pytest.raises(RequestError, match="must leave the weight as it is"):
        OwnFormula("toys:in_place", {})(moment)


def test_the_documents_own_guests_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/design.md's module and option files, as a reader would copy them; and its generator as it stands there."""
    modules = [block.text for block in DESIGN if block.file == "mine.py"]
    assert max(map(str.count, modules, repeat("\n"))) <= 40
    write_files("docs/design.md", tmp_path)
    (tmp_path / "mine.py").write_text("\n".join(modules), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = resolve(["schedule=pairs", "optimizer=signs", "parallelism.pipeline=3", "schedule.microbatches=6"])
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([2.0, -3.0])
    optimizer_of(config.optimizer).make(config.optimizer, [weight]).step()
    assert weight.tolist() == pytest.approx([0.99, 1.01])
    assert schedule_problems(config) == []
    words = ["lr_scheduler=plateau", "lr_scheduler.kwargs.decay=0.5", "optimizer.lr=0.4", "trainer.max_steps=8"]
    rate = learning_rate((rates := resolve(words)).lr_scheduler, peak_rate(rates), rates.trainer.max_steps)
    assert [rate(step) for step in (0, 2, 4, 6, 7, 8)] == pytest.approx([0.4 / 3, 0.4, 0.4, 0.2, 0.1, 0.1])
    section = resolve(["compression=rounded", "compression.kwargs.digits=1"]).compression
    made = compression_of(section).make
    gradients: Any = SimpleNamespace(flats=[torch.tensor([0.26, -0.11, torch.inf])], start_sum=lambda *_: [])
    assert made is not None
    assert made(section, gradients).start(gradients, AloneTransport(torch.device("cpu")), (0, 1)) == []
    assert gradients.flats[0].tolist() == pytest.approx([0.3, -0.1, torch.inf])
    own = schedule_of(config)
    assert (own.name, own.ranks, own.microbatches) == ("pairs", 3, 6)
    for words in (["offload=every_second"], ["offload=largest"], ["weight_prediction=ahead", *MOMENTUM]):
        gap = ["weight_prediction.gap=1"] if "weight_prediction=ahead" in words else []
        assert main(["plan", *LAYOUT, *words, *gap, "--json"]) == 0
    capsys.readouterr()
    assert main(["verify", "model=scaled", "data.batch_size=4", *LAYOUT[1:], "--steps", "2"]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert main(["plan", "model=gpt", "hardware=a100_80gb", *EVENLY, "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert (layout["pipeline"], layout["data"]) == (2, 2)
    assert run_example("pairs.py")["SPEC"].generate(ScheduleRequest(ranks=3, microbatches=6)).actions == own.actions


def run_example(name: str) -> dict[str, Any]:
    """What a block of the document defines that is a file of this name, or a part of one, of the repository."""
    (text,) = (block.text for block in DESIGN if Path(block.file).name == name and block.language == "python")
    imports = [line for line in text.splitlines() if line.startswith("from runner.")]
    assert imports == sorted(imports)  # or the linter would refuse the copy
    made: dict[str, Any] = {}
    exec(text, made)
    return made


def test_the_documents_rule_refuses_what_it_says() -> None:
    (problem,) = run_example("row.py")["ROW"].problems(resolve(["optimizer=muon", "compression=fp16"]))
    assert problem.line().startswith(
        "compression.name = fp16: must be another with optimizer=muon. It is an example. Try "
    )


def test_the_documents_compressor_sums_over_replicas() -> None:
    """Two replicas, of which the other one's signs and mean are given."""
    rounds = run_example("sign_mean.py")["sign_mean"]([torch.tensor([1.0, -3.0]), torch.zeros(2)], [{}, {}], Turn(0, 2))
    signs = next(rounds).tensor
    mean = rounds.send([signs, -signs]).tensor
    with pytest.raises(StopIteration) as ended:
        rounds.send([mean, 3 * mean])
    assert [each.tolist() for each in ended.value.value.sums] == [[-2.0, 2.0], [0.0, 0.0]]
    assert [each.tolist() for each in ended.value.value.left] == [[0.0, -2.0], [0.0, 0.0]]
