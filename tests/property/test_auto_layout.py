"""``parallelism=auto``: what is printed can be typed, fits, and trains as one process does, as predicted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tensor_models
import torch
from thread_runs import told
from whole_runs import peaks, train

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.model.apart import ApartError
from runner.plan.planners.published.registry import PUBLISHED
from runner.profile import ModelProfile

_WORDS = (
    "model=custom", "model.target=tensor_models:build", "data=custom", "data.target=tensor_models:data", "loss=custom",
    "loss.target=tensor_models:loss", "data.batch_size=8", "data.shuffle=false", "optimizer.lr=0.01",
    "optimizer.eps=1e-3", "optimizer.weight_decay=0.1", "device=cpu", "hardware=laptop_cpu", "logger=none",
    "trainer.progress=false", "launcher.watchdog_seconds=null", "trainer.max_steps=2", "seed=3",
)  # fmt: skip
_RULES = ",".join(f"{name}:'{way}'" for name, way in (tensor_models.RULES | {"*.head_norm": "partial"}).items())
_AUTO = (
    *_WORDS,
    f"parallelism.sharding={{{_RULES}}}",
    "parallelism=auto",
    "parallelism.ranks=4",
    "parallelism.search=quick",
)


_PROFILES: dict[tuple[object, ...], ModelProfile] = {}


def known(config: RunConfig, make: Callable[[RunConfig], ModelProfile]) -> ModelProfile:
    """The profile of the one model of this file, made once for each size."""
    key = config.data.batch_size, config.schedule.microbatches, config.parallelism.data, config.parallelism.tensor
    if key not in _PROFILES:
        _PROFILES[key] = make(config)
    return _PROFILES[key]


def here(function: Callable[..., Any], *given: Any) -> Any:
    """What a process of its own would answer."""
    try:
        return function(*given)
    except RequestError:
        raise
    except Exception as error:
        raise ApartError(str(error)) from error


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own; the model is profiled in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("runner.profiling.model.cached_profile", known)
    for module in ("model", "together"):
        monkeypatch.setattr(f"runner.profiling.{module}.apart", here)
    return tmp_path


def planned(words: Sequence[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    """The document of ``runner plan --json``."""
    assert main(["plan", *words, "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.mark.costly
@pytest.mark.parametrize("share", [1.0, 0.65])
def test_what_is_printed_is_planned_alike_and_trains_as_one_process(
    share: float, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory is a share of what the layout with enough of it takes; each run keeps to its limit and its prediction."""
    plenty = planned(_AUTO, capsys)
    limit = int(max(plenty["peak_memory_bytes"]) * share)
    found = planned([*_AUTO, f"memory_limit={limit}"], capsys)
    assert found["complete"] is True
    assert max(found["peak_memory_bytes"]) <= limit
    typed = planned(found["request"], capsys)
    for key in ("step_seconds", "peak_memory_bytes", "partition", "fits"):
        assert typed[key] == found[key], key
    (place / "run").mkdir()
    run = train(resolve(found["request"]), place / "run")
    assert [predicted for _, predicted in peaks(run)] == found["peak_memory_bytes"]
    assert all(counted <= predicted <= limit for counted, predicted in peaks(run))
    alone = torch.tensor(tensor_models.losses_alone())
    torch.testing.assert_close(torch.tensor([float(each) for each in run.losses]), alone, rtol=2e-6, atol=2e-6)


_WHOLE = """
import torch
from torch import nn

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)

def data():
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(16, generator=made), torch.randn(4, generator=made)) for _ in range(16)]
"""


@pytest.mark.costly
def test_a_module_that_lists_no_layers_is_cut(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "whole.py").write_text(_WHOLE)
    words = [word for word in _WORDS if not word.startswith(("model.", "data.target", "loss"))]
    words += ["model.target=whole:Whole", "data.target=whole:data", "loss=mse", "parallelism=auto"]
    words += ["parallelism.ranks=2", "parallelism.search=quick", "parallelism.tensor=1"]
    _PROFILES.clear()
    found = planned([*words, "parallelism.pipeline=2"], capsys)
    assert len(found["partition"]) == 2
    _PROFILES.clear()


@pytest.mark.costly
def test_what_is_named_stays(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned([*_AUTO, "parallelism.pipeline=2", "schedule=gpipe", "schedule.microbatches=4"], capsys)
    assert found["layout"]["pipeline"] == 2
    assert found["schedule"] == "gpipe"
    assert "schedule=gpipe" in found["request"]
    assert not {"schedule", "schedule.microbatches", "parallelism.pipeline"} & set(found["chosen"])


@pytest.mark.costly
def test_nothing_fits_names_the_nearest_and_what_is_said_to_help_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest layout is typed, and needs as much; so is every remedy: the request then fits."""
    words = [each for each in _AUTO if not each.startswith(("parallelism.ranks", "parallelism.sharding"))]
    words.append("parallelism.tensor=1")
    found = planned([*words, "parallelism.ranks=2", "memory_limit=2kB"], capsys, status=3)
    least = found["nearest"]
    assert found["fits"] is False
    assert least["lacks_bytes"] == least["peak_memory_bytes"] - 2000
    again = planned([*_WORDS, "memory_limit=2kB", *least["overrides"]], capsys, status=3)
    assert max(again["peak_memory_bytes"]) == least["peak_memory_bytes"]
    limit = f"memory_limit={int(least['peak_memory_bytes'] * 0.7)}"
    line = planned([*words, "parallelism.ranks=2", limit], capsys, status=3)["problems"][0]
    remedies = re.findall(r"(\S+=\S+) \(", line.partition(". Try ")[2])
    assert "parallelism.ranks=4" in remedies
    for remedy in remedies:
        ranks = () if remedy.startswith("parallelism.ranks") else ("parallelism.ranks=2",)
        assert planned([*words, *ranks, limit, remedy], capsys)["fits"], remedy


@pytest.mark.costly
def test_a_published_planner_whose_choice_does_not_fit_speaks_of_its_own_choice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = planned([*_AUTO, "planner=pipe_torch", "memory_limit=2kB", "parallelism.ranks=2"], capsys, status=3)
    line = found["problems"][0]
    assert line.startswith("planner=pipe_torch chose a layout that does not fit 2.00 kB: it needs ")
    assert line.endswith("Try planner=joint.")


@pytest.mark.costly
def test_a_layout_is_found_for_several_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*_AUTO, "planner=megatron", "launcher=slurm", "launcher.nodes=2"]
    found = planned(words, capsys)
    assert "launcher.nodes=2" in found["request"]
    degrees = (found["layout"][axis] for axis in ("pipeline", "data", "tensor"))
    assert prod(degrees) == 4


@pytest.mark.costly
def test_every_planner_is_judged_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *_AUTO, "--planners", "all", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["planner"] for row in rows] == ["joint", *PUBLISHED]
    for row in rows:
        assert (row["step_seconds"] is None) == bool(row["why_not"]) or not row["fits"]
        if row["runnable"] and row["planner"] != "joint":
            typed = planned([*_WORDS, *row["overrides"]], capsys)
            assert typed["step_seconds"] == row["step_seconds"]
            assert rows[0]["step_seconds"] <= row["step_seconds"] * 1.001
    own = planned([*_AUTO, "planner=megatron"], capsys)
    assert own["step_seconds"] == next(row["step_seconds"] for row in rows if row["planner"] == "megatron")


def test_another_value_of_each_key_is_no_faster(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned([*_AUTO, "--why"], capsys)
    assert {row["key"] for row in found["why"]} >= {"pipeline", "schedule"}
    assert all(row["step_seconds"] >= found["step_seconds"] * 0.999 for row in found["why"])


@pytest.mark.costly
def test_five_lines_and_a_recipe(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "conf" / "recipe").mkdir(parents=True)
    assert main(["plan", *_AUTO, "--write", "conf/recipe/found.yaml"]) == 0
    text = capsys.readouterr().out
    for begin in ("parallelism=auto: ", "why: ", "time: ", "memory: ", "run it: runner train "):
        assert sum(line.startswith(begin) for line in text.splitlines()) == 1, begin
    of_recipe = planned(["recipe=found"], capsys)
    typed = planned(planned(_AUTO, capsys)["request"], capsys)
    assert of_recipe["peak_memory_bytes"] == typed["peak_memory_bytes"]
    assert of_recipe["step_seconds"] == typed["step_seconds"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("parallelism.ranks=0",), "parallelism.ranks = 0: must be at least 1"),
        (("parallelism.search=long",), "parallelism.search = long: must be one of quick, normal, thorough"),
        (("schedule=pipedream",), "schedule = pipedream: must be a flushed order of its own with parallelism=auto"),
        (("parallelism.pipeline=3",), "parallelism = auto: has no layout that keeps what was named"),
        (("launcher.nodes=2",), "launcher.nodes = 2: belongs to launcher=slurm"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    words: Sequence[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *_AUTO, *words]) == 2
    assert line in capsys.readouterr().err


def test_other_commands_and_ranks_that_were_started_refuse_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["verify", *_AUTO]) == 2
    assert "parallelism = auto: must be typed for `runner train`" in capsys.readouterr().err
    assert main(["plan", *_WORDS, "parallelism.ranks=4"]) == 2
    assert "parallelism.ranks = 4: belongs to parallelism=auto" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["plan", *_AUTO]) == 2
    assert "must be chosen before the ranks are started" in capsys.readouterr().err


@pytest.mark.costly
def test_jobs_of_a_sweep_get_a_layout_each() -> None:
    words = ("model=mlp", "parallelism=auto", "device=cpu", "hardware=laptop_cpu")
    status, said = told("plan", "-m", *words, "parallelism.ranks=1,2", "--json")
    documents = json.loads(said[said.index("[") :])
    assert (status, [each["layout"]["world_size"] for each in documents]) == (0, [1, 2])
    for document in documents:
        typed = json.loads(told("plan", *document["request"], "--json")[1])
        same = ("step_seconds", "peak_memory_bytes", "partition")
        assert {key: typed[key] for key in same} == {key: document[key] for key in same}
    assert told("plan", "-m", *words, "parallelism.ranks=1,2")[1].count("runner train model=mlp") == 2
    small = (*words, "memory_limit=1kB", "parallelism.ranks=1,2")
    assert told("plan", "-m", *small)[1].count("fits 1.00 kB: the nearest needs") == 2
