"""An option that is set and that nothing reads is told, a pattern that matches nothing is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.cli.main import main
from runner.cli.request import checked
from runner.config.compose.resolve import resolve
from runner.config.rules.sections import CONFIG_TABLES
from runner.config.rules.table import Row
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.model.check_pretrained import pattern_problems
from runner.plan.rules.unread import UNREAD
from runner.schedule.catalogue.registry import OPTIONS, ScheduleRequest, request_problems

# Keys that every run reads, whatever else is asked for, or that a rule of the plan refuses where they do not fit.
ALWAYS_READ = {
    "": "name seed memory_limit device compile sweep run_dir resume report metrics callbacks",
    "model": "name target kwargs needs pretrained pretrained_strict pretrained_names goes_with",
    "data": "name target kwargs batch_size shuffle collate drop_last workers needs goes_with",
    "loss": "name target kwargs",
    "adapter": "name",
    "embedding": "name",
    "parallelism": "name pipeline data tensor devices goes_with",
    "schedule": "name microbatches file post_validation asynchronous target kwargs",
    "zero": "name stage config",
    "offload": "name optimizer parameters weights drive frozen_only scope activations blocks fraction target kwargs",
    "activation_checkpoint": "name target kwargs",
    "compression": "name target kwargs error_feedback",
    "approximate_backward": "name",
    "kernels": "name attention norm elementwise loss substitutions",
    "optimizer": "name lr weight_decay decoupled_weight_decay",
    "weight_prediction": "name preset gap target kwargs",
    "lr_scheduler": "name base_batch",
    "precision": "name",
    "trainer": (
        "max_steps max_epochs grad_clip_norm grad_clip_value on_nonfinite freeze ema_decay threads val_every progress"
    ),
    "checkpoint": "timeout_seconds asynchronous name every every_seconds keep_best try_first allow_pickle",
    "hardware": (
        "name flops memory_bytes host_memory_bytes devices memory_bytes_per_second host_link_bytes_per_second "
        "host_memory_bytes_per_second source"
    ),
    "launcher": (
        "name rendezvous_timeout_seconds start_timeout_seconds step_timeout_seconds watchdog_seconds "
        "exit_timeout_seconds max_restarts wait dry_run"
    ),
    "profiler": "name",
    "logger": "name others",
    "profile": "refresh",
}


def keys_of(section: object, path: str = "") -> Iterator[str]:
    for field in fields(section):  # type: ignore[arg-type]  # a dataclass
        value = getattr(section, field.name)
        yield from keys_of(value, f"{path}{field.name}.") if is_dataclass(value) else (f"{path}{field.name}",)


def test_every_key_is_told_where_nothing_reads_it() -> None:
    """A new key of the schema is read by every run, or has a rule that says when it is not: a new key needs either."""
    rows = [row for table in CONFIG_TABLES for row in table.rules if isinstance(row, Row)]
    told = {row.path for row in rows if row.is_owned or "belong" in row.rule}
    foreign = [f"schedule.{key}" for key in ("chunks", *OPTIONS) if _is_foreign(key)]
    always = [f"{section}.{key}".lstrip(".") for section, keys in ALWAYS_READ.items() for key in keys.split()]
    of_sweeps = [entry for entry in UNREAD if entry.keys[0].startswith("sweep")]
    waiting = [key for entry in UNREAD if entry in of_sweeps or not entry.typed for key in entry.keys]
    known, keys = {*always, *told, *foreign, *waiting}, set(keys_of(RunConfig()))
    assert {key for key in keys if not any(key == each or key.startswith(f"{each}.") for each in known)} == set()


def _is_foreign(key: str) -> bool:
    """Whether zb_h1, which has no keys of its own, refuses one that other schedules read."""
    request = ScheduleRequest(2, 4, chunks=3) if key == "chunks" else ScheduleRequest(2, 4, options={key: "x"})
    problems = request_problems("zb_h1", request)
    return any(problem.path == f"schedule.{key}" for problem in problems)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["partition=uniform"], "partition = uniform: is not read. The run has one stage"),
        (["partition=uniform", "parallelism.pipeline=2", "schedule.microbatches=2"], ""),
        (["adapter.rank=8"], "adapter.rank = 8: is not read: it belongs to adapter=lora. Try adapter=lora"),
        (["transport.delay_seconds=0.5"], "transport.delay_seconds = 0.5: is not read. The run has one rank"),
        (["transport.delay_seconds=0.5", "parallelism.data=2"], ""),
        (["zero.bucket_elements=7"], "zero.bucket_elements = 7: is not read."),
        (["zero=1", "zero.bucket_elements=7", "parallelism.data=2"], ""),
        (["cost.B=3"], "cost.B = 3.0: is not read. A plan takes the seconds of the model's layers"),
        (["schedule=zb_auto", "cost.B=3", "parallelism.pipeline=2", "schedule.microbatches=2"], ""),
        (["schedule.twin_check_every=5"], "schedule.twin_check_every = 5: is not read."),
        (["logger=none", "+logger.kwargs.save_dir=x"], "logger.kwargs.save_dir = x: is not read. No logger is called"),
        (["sweep_report=a:b"], "sweep_report = a:b: is not read. It belongs to a sweep"),
        (["sweep_most=5"], "sweep_most = 5: is not read. It belongs to a sweep"),
        (["model.split_points=[2]"], "model.split_points = ['2']: is not read. One rank holds the whole model"),
        (["seed=1", "data.batch_size=8", "optimizer=sgd"], ""),
    ],
)
def test_what_is_set_and_not_read_is_told(words: list[str], told: str) -> None:
    """The line names the key, its value, why nothing reads it, and the way out."""
    unread: list[str] = []
    checked(["model=mlp", *words], command="plan", unread=unread)
    assert len(unread) == bool(told)
    assert all(line.startswith(told) for line in unread)


def test_a_key_with_two_values_is_told() -> None:
    unread: list[str] = []
    words = ["model=mlp", "trainer.max_steps=3", "seed=1", "+trainer.max_steps=4", "seed=1"]
    assert checked(words, command="plan", unread=unread).trainer.max_steps == 4
    assert unread == ["trainer.max_steps is given as 3 and as 4: the last one counts"]


def test_a_file_of_ones_own_counts_as_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an option file of the package says is nothing that the user has set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    recipe = "# @package _global_\n# Mine.\nzero:\n  bucket_elements: 9\nsweep_report: a:b\n"
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(recipe)
    unread: list[str] = []
    checked(["model=mlp", "recipe=mine"], command="plan", unread=unread)
    assert [line.partition(":")[0] for line in unread] == ["zero.bucket_elements = 9"]
    others: list[str] = []
    checked(["recipe=rudalle_tiny", "parallelism=single"], command="plan", unread=others)
    assert others == []


@pytest.mark.costly
def test_the_commands_tell_it(capsys: pytest.CaptureFixture[str]) -> None:
    """In the notes of a plan, and on standard error of the others; a schedule reads but the keys that draw it."""
    assert main(["plan", "model=mlp", "zero.bucket_elements=9", "device=cpu", "--json"]) == 0
    assert any(
        "zero.bucket_elements = 9: is not read" in line for line in json.loads(capsys.readouterr().out)["advice"]
    )
    assert main(["schedule", "schedule=gpipe", "parallelism.pipeline=2", "data.batch_size=9"]) == 0
    assert "data.batch_size = 9: is not read. A schedule is drawn from" in capsys.readouterr().err


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.q_proj(value) + self.v_proj(value)
        return added


def attentive() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(11, 8), Attention(), Attention(), nn.Linear(8, 11))


class Later(nn.Module):
    """Its layers are made by the rank that holds them."""

    def layers(self) -> list[Any]:
        return [lambda: nn.Embedding(11, 8), Attention, lambda: nn.Linear(8, 11)]


ADAPTED = ["adapter=lora", "adapter.rank=2"]


@pytest.mark.costly
@pytest.mark.parametrize("model", ["attentive", "Later"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            [*ADAPTED, "adapter.targets=[q_prj,v_proj]"],
            "adapter.targets = q_prj: must name layers. The nearest name is q_proj. "
            "Try 'adapter.targets=[q_proj,v_proj]'",
        ),
        ([*ADAPTED, "adapter.targets=[v_proj,1.q_proj,wo]"], "adapter.targets = wo: must name layers."),
        ([*ADAPTED, "adapter.targets=[v_proj,1.q_proj]"], ""),
        (["embedding=tensor_train", "embedding.rank=1", "embedding.targets=['0','4*']"], "embedding.targets = 4*:"),
        (["trainer.freeze=['0.*','8.*']"], "trainer.freeze = 8.*: must match names of weights"),
    ],
)
def test_every_pattern_matches_something(model: str, words: list[str], told: str) -> None:
    """Whatever the other patterns match; layers that are built later count, too."""
    config = resolve([f"model.target=test_options_that_nothing_reads:{model}", "data=random_tokens", *words])
    try:
        lines = [problem.line() for problem in pattern_problems(config)]
    except RequestError as error:
        lines = [problem.line() for problem in error.problems]
    assert len(lines) == bool(told)
    assert all(line.startswith(told) for line in lines), lines


@pytest.mark.costly
@pytest.mark.parametrize(
    ("words", "trained", "total", "told"),
    [
        ([], 475, 475, "475 parameters, all trained"),
        (["trainer.freeze=['0.*']"], 475 - 88, 475, "475 parameters, 387 of 475 trained"),
        ([*ADAPTED, "adapter.targets=[v_proj]"], 64, 475 + 64, "539 parameters, 64 of 539 trained"),
    ],
)
def test_a_plan_says_how_much_is_trained(
    capsys: pytest.CaptureFixture[str], words: list[str], trained: int, total: int, told: str
) -> None:
    """Of how many weights in all; adapters' own are among both."""
    model = ["model.target=test_options_that_nothing_reads:attentive", "data=random_tokens", "loss=cross_entropy"]
    model += ["data.kwargs.vocab_size=11", "data.batch_size=2", "device=cpu", "data.kwargs.sequence_length=4"]
    assert main(["plan", *model, *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["parameters"], document["trained_parameters"]) == (total, trained)
    assert main(["plan", *model, *words]) == 0
    assert told in capsys.readouterr().out
