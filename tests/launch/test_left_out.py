"""What ``parallelism=auto`` cannot look at is told with its reason, also where it looks for a layout that fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.launch.run.find_layout import find_layout

_MODULE = """
import torch
from torch import nn

class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        return self.last(-x if x.sum().item() < 0 else x)

def data():
    return torch.utils.data.TensorDataset(torch.ones(16, 16), torch.ones(16, 4))
"""


@pytest.mark.costly
def test_a_module_that_cannot_be_cut_is_searched_without_pipelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reading.py").write_text(_MODULE)
    words = ["model.target=reading:Reading", "data.target=reading:data", "loss=mse", "data.batch_size=8", "device=cpu"]
    searched = [*words, "hardware=laptop_cpu", "parallelism=auto", "parallelism.ranks=2"]
    assert main(["plan", *searched, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (told,) = found["left_out"]
    assert told.startswith("pipelines, parallelism.tensor=2 (cannot be traced")
    assert "x.sum().item()" in told
    assert found["layout"]["pipeline"] == 1
    assert main(["plan", *searched]) == 0
    assert "not searched: pipelines" in capsys.readouterr().out
    assert main(["plan", *words, "hardware=laptop_cpu", "memory_limit=2kB", "--json"]) == 3
    assert "not searched were pipelines" in json.loads(capsys.readouterr().out)["problems"][0]


@pytest.mark.costly
def test_layers_are_profiled_in_parts_only_where_that_could_help() -> None:
    """With many samples a step nearly computes all the time; with one for each rank it exchanges gradients."""
    asked = ["model=gpt", "hardware=a100_80gb", "parallelism=auto", "parallelism.ranks=2", "parallelism.search=quick"]
    many = [*asked, "data.batch_size=512", "hardware.link_latency_seconds=0"]
    found = find_layout(many)
    assert [each.tensor for each in found.problem.divisions] == [1]
    assert found.problem.left_out[-1].startswith("parallelism.tensor=2 (ranks that always compute would save ")
    assert found.chosen.best.seconds * 0.9 <= found.problem.busy_seconds <= found.chosen.best.seconds
    whole = find_layout(many, every_degree=True)
    assert [each.tensor for each in whole.problem.divisions] == [1, 2]
    assert whole.chosen.best.seconds >= 0.9 * found.chosen.best.seconds
    assert len(find_layout([*asked, "data.batch_size=2"]).problem.divisions) == 2
