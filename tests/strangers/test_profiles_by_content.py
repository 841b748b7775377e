"""What is known of a model is used again for that model alone, whatever its size depends on."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plan_profiles import model as made_up

from runner.config.compose.resolve import resolve
from runner.profile import ModelProfile
from runner.profiling import cache, form
from runner.profiling.busy import busy_share
from runner.profiling.cache import cached_profile
from runner.reads import installed
from runner.training.first_batches import first_batches

MODEL = """
import json, os
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset
BESIDE = Path(__file__).parent

def of_file():
    sizes = json.loads((BESIDE / "sizes.json").read_text())
    layers = [nn.Linear(sizes["width"], sizes["width"]) for _ in range(sizes["depth"])]
    return nn.Sequential(nn.Linear(4, sizes["width"]), *layers, *(nn.Tanh() for _ in range(sizes.get("tanh", 0))))

def of_variable():
    return nn.Sequential(nn.Linear(4, 3), *(nn.Tanh() for _ in range(int(os.environ.get("STRANGE_DEPTH", "1")))))

def of_module():
    from beside_{number} import WIDTH
    return nn.Sequential(nn.Linear(4, WIDTH))

def of_real_values():
    width = torch.tensor(json.loads((BESIDE / "sizes.json").read_text())["width"] * 1.0)
    return nn.Sequential(nn.Linear(4, int(width.exp().log().round())))

def plain():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

def rows():
    table = np.loadtxt(BESIDE / "rows.csv", delimiter=",", ndmin=2)
    return TensorDataset(torch.tensor(table, dtype=torch.float32), torch.zeros(len(table), dtype=torch.int64))
"""

KEEPS = """
import functools, json, os
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate
BESIDE = Path(__file__).parent
AT_IMPORT = json.loads((BESIDE / "sizes.json").read_text())["width"] * int(os.environ["STRANGE_DEPTH"])

@functools.cache
def kept():
    return len((BESIDE / "rows.csv").read_text().splitlines())

class Repeating(nn.Linear):
    def forward(self, x):
        return super().forward(x.repeat(AT_IMPORT * kept(), 1)[: len(x)])

def model():
    return Repeating(4, 3)

ALL = os.environ.copy()
(BESIDE / "sizes.json").write_text((BESIDE / "sizes.json").read_text())  # as it was, but at another time

def data():
    json.loads((BESIDE / "sizes.json").read_text())
    return TensorDataset(torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64))

def collate(samples):
    kept()
    return default_collate(samples)
"""


class Project:
    """A user's folder, and how often its model was profiled."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number, self.profiled = folder, number, 0
        self.profile = made_up([])
        (folder / f"mine_{number}.py").write_text(MODEL.replace("{number}", str(number)))
        self.write("sizes.json", '{"width": 3, "depth": 2}')
        self.write("rows.csv", "1,2,3,4\n5,6,7,8\n")
        self.write(f"beside_{number}.py", "WIDTH = 3\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def plan(self, model: str, *words: str) -> ModelProfile:
        named = [f"model.target=mine_{self.number}:{model}", f"data.target=mine_{self.number}:rows"]
        return cached_profile(resolve([*named, "data.batch_size=2", "device=cpu", *words]), self._make)

    def profiles_in_a_process(self, *edits: str) -> int:
        """How often a model is profiled in a process that has read nothing yet, and opens the data before.

        Args:
            edits: what a file is made before each plan; none: there is one plan.
        """

        def plan() -> None:
            named = ["model.target=keeps:model", "data.target=keeps:data", "data.collate=keeps:collate"]
            config = resolve([*named, "data.batch_size=2", "device=cpu"])
            for text in edits or [(self.folder / "sizes.json").read_text()]:
                self.write("sizes.json", text)
                first_batches(config)
                cached_profile(config, self._make)
            os._exit(10 + self.profiled)

        child = multiprocessing.get_context("fork").Process(target=plan)
        child.start()
        child.join()
        return (child.exitcode or 0) - 10

    def _make(self, _: object) -> ModelProfile:
        self.profiled += 1
        return self.profile


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Project:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("STRANGE_DEPTH", "2")
    monkeypatch.syspath_prepend(str(tmp_path))
    return Project(tmp_path, abs(hash(request.node.nodeid)) % 10**9)


CHANGES: dict[str, tuple[str, Callable[[Project, pytest.MonkeyPatch], object]]] = {
    "width in a file": ("of_file", lambda p, _: p.write("sizes.json", '{"width": 5, "depth": 2}')),
    "depth in a file": ("of_file", lambda p, _: p.write("sizes.json", '{"width": 3, "depth": 3}')),
    "what has no weights": ("of_file", lambda p, _: p.write("sizes.json", '{"width": 3, "depth": 2, "tanh": 2}')),
    "columns of the data's file": ("plain", lambda p, _: p.write("rows.csv", "1,2,3,4,5\n5,6,7,8,9\n")),
    "rows of the data's file": ("plain", lambda p, _: p.write("rows.csv", "1,2,3,4\n5,6,7,8\n9,9,9,9\n")),
    "a variable of the environment": ("of_variable", lambda _, patch: patch.setenv("STRANGE_DEPTH", "7")),
    "its absence": ("of_variable", lambda _, patch: patch.delenv("STRANGE_DEPTH")),
    "a module that the model's function imports": (
        "of_module",
        lambda p, _: p.write(f"beside_{p.number}.py", "WIDTH = 4\n"),
    ),
    "a file, by a model that fake tensors cannot run": (
        "of_real_values",
        lambda p, _: p.write("sizes.json", '{"width": 4}'),
    ),
    "a package": ("plain", lambda p, _: (p.folder / "site" / "other-2.0.dist-info").mkdir()),
}


@pytest.mark.costly
@pytest.mark.parametrize("change", CHANGES)
def test_another_content_is_another_profile(
    change: str, project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site = project.folder / "site"
    site.mkdir()
    folders = (*installed(), str(site))
    monkeypatch.setattr(form, "installed", lambda: folders)
    model, make_other = CHANGES[change]
    project.plan(model)
    monkeypatch.setenv("STRANGE_OTHER", "1")  # which nobody reads
    project.write("notes.txt", "which nobody reads")
    project.plan(model)
    assert project.profiled == 1, "nothing that is read has changed"
    make_other(project, monkeypatch)
    project.plan(model)
    assert project.profiled == 2
    assert capfd.readouterr() == ("", "")


def test_what_a_process_keeps_of_its_reading_tells_profiles_apart(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("keeps.py", KEEPS)
    assert [project.profiles_in_a_process() for _ in range(2)] == [1, 0]
    for change in ("width in a file", "rows of the data's file", "a variable of the environment"):
        CHANGES[change][1](project, monkeypatch)
        assert project.profiles_in_a_process() == 1, change
    monkeypatch.setenv("STRANGE_OTHER", "1")  # which is only copied
    assert project.profiles_in_a_process() == 0
    three, six = (f'{{"width": {width}, "depth": 2}}' for width in (3, 6))
    assert project.profiles_in_a_process(three, six, three) == 3, "each time something else was kept, or read"
    project.write("sizes.json", six)
    assert project.profiles_in_a_process() == 1, "what another process kept is not of this file"


def test_a_profile_can_be_made_anew(project: Project) -> None:
    project.plan("plain")
    project.plan("plain", "profile.refresh=true")
    assert project.profiled == 2
    project.plan("plain")
    assert project.profiled == 2


@pytest.mark.costly
@pytest.mark.parametrize(("disturbed", "now", "profiled"), [(0.5, 0.0, 2), (0.5, 0.4, 1), (0.05, 0.0, 1)])
def test_seconds_of_a_busy_moment_are_measured_again_in_a_quiet_one(
    disturbed: float, now: float, profiled: int, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "busy_share", lambda: now)
    project.profile = replace(project.profile, seconds_source="measured", measured_at=1e9, busy_share=disturbed)
    project.plan("plain")
    project.profile = replace(project.profile, busy_share=0.0)
    assert project.plan("plain").busy_share == (disturbed if profiled == 1 else 0.0)
    assert project.profiled == profiled


def test_the_share_of_others_is_a_share() -> None:
    assert 0 <= busy_share() <= 1


def test_a_model_that_cannot_be_made_is_told_by_its_profile(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    project.write("sizes.json", "no JSON")
    project.plan("of_file")
    project.plan("of_file")
    assert project.profiled == 2
    assert caplog.records == []
