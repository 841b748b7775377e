"""What ``runner plan`` tells of a model, its speed, its layout, and of the jobs of a sweep, at 80 columns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from plan_command import gpt, in_own_place

from runner.cli.main import main

GPT = gpt(layers=2)
# Embeddings, two blocks of norms, attention and feed-forward, and the head.
PARAMETERS = (512 + 64) * 16 + 2 * (2 * 32 + 16 * 48 + 48 + 16 * 16 + 16 + 2 * 16 * 64 + 64 + 16) + 32 + 512 * 16


@pytest.fixture(autouse=True)
def _own_place(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_own_place(tmp_path_factory, tmp_path, monkeypatch)


def text(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *GPT, *words]) == 0
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(text(capsys, *words, "--json"))


@pytest.mark.costly
def test_a_plan_tells_the_model_and_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = document(capsys, "parallelism.pipeline=2", "schedule.microbatches=4")
    assert plan["parameters"] == PARAMETERS
    assert (plan["layers"], plan["input_shapes"]) == (4, [[8, 64]])
    assert (plan["samples_per_step"], plan["tokens_per_step"]) == (32, 32 * 64)
    assert plan["tokens_per_second"] == pytest.approx(32 * 64 / plan["step_seconds"])
    assert 0 < plan["mfu"] < 0.4
    told = text(capsys, "parallelism.pipeline=2", "schedule.microbatches=4")
    assert f"{PARAMETERS / 1000:.1f} thousand parameters, all trained; input 8 x 64;" in told
    assert "2 stages, 4 layers in all" in told
    assert f"MFU {plan['mfu']:.1%}" in told
    assert " tokens/s, " in told


def test_shared_weights_are_counted_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "tied.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    embed, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)\n"
        "    head.weight = embed.weight\n"
        "    return nn.Sequential(embed, nn.Linear(4, 4), head)\n"
        "def data():\n"
        "    import torch\n"
        "    ids = torch.zeros(32, 6, dtype=torch.long)\n"
        "    return torch.utils.data.TensorDataset(ids, ids)\n"
    )
    words = ["model.target=tied:build", "data.target=tied:data", "loss=cross_entropy", "hardware=a100_80gb"]
    assert main(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 10 * 4 + 4 * 4 + 4


@pytest.mark.costly
def test_samples_shorter_than_the_model_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    short = document(capsys, "model.kwargs.sequence_length=2048")["advice"]
    (note,) = [line for line in short if "tokens" in line]
    assert note.startswith("samples have 64 tokens, model.kwargs.sequence_length is 2048")
    assert note.endswith("Try data.kwargs.sequence_length=2048")
    assert not [line for line in document(capsys)["advice"] if "samples have" in line]


@pytest.mark.costly
def test_a_chosen_schedule_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Long times are told in seconds."""
    words = ("parallelism.pipeline=2", "schedule.microbatches=4", "hardware.flops.fp32=1e6")
    plan = document(capsys, *words, "schedule=auto")
    assert not any(" ms" in line for line in plan["advice"])
    chosen = plan["advice"][0].removeprefix("schedule=auto takes ").replace("an order of its own", "auto")
    assert chosen.startswith(plan["schedule"])
    assert plan["microbatches"] == 4


@pytest.mark.costly
def test_memory_of_the_host_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("parallelism.data=2", "zero.stage=2", "offload.optimizer=cpu")
    told = text(capsys, *words)
    (host,) = re.findall(r"host: at most (\d+) kB a rank of 1\.00 TB", told)
    assert int(host) > 0
    assert "host" in told.partition("memory by rank")[2].partition("fits:")[0]


@pytest.mark.costly
def test_a_sweep_ends_in_one_sorted_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-m", "parallelism.pipeline=1,9", "schedule.microbatches=1,4", "schedule=1f1b")
    told = text(capsys, *words)
    lines = told.splitlines()
    assert len(lines) < 25
    (header,) = [number for number, line in enumerate(lines) if line.split()[:1] == ["layout"]]
    assert lines[header].split() == ["layout", "step", "tokens/s", "peak", "fits"]
    rows = [line.split() for line in lines[header + 2 :] if line.startswith(" pipeline=")]
    rates = [float(row[4].replace(",", "")) for row in rows if row[-1] == "yes"]
    assert len(rows) == 4
    assert sorted(row[1] for row in rows) == ["microbatches=1"] * 2 + ["microbatches=4"] * 2
    assert rates == sorted(rates, reverse=True)
    assert [row[-1] for row in rows] == ["yes"] * 2 + ["refused"] * 2
    assert "the schedule makes 9 stages, the model has 4 layers" in " ".join(told.split())


@pytest.mark.costly
def test_why_this_layout(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("parallelism.pipeline=2", "schedule.microbatches=4", "--why")
    layout = document(capsys, *words)["why"]["layout"]
    assert "named by the request: pipeline 2 x data 1 x tensor 1, schedule.microbatches=4" in layout
    assert any(line.startswith("partition=auto takes ") for line in layout)
    assert any(line.startswith("pipelining ") for line in layout)
    assert main(["plan", *GPT, *words, "memory_limit=300kB", "--json"]) == 3
    layout = json.loads(capsys.readouterr().out)["why"]["layout"]
    assert any(line.startswith("one device needs ") and line.endswith(" of 300 kB") for line in layout)


@pytest.mark.costly
def test_nothing_is_wider_than_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("parallelism.pipeline=4", "parallelism.data=64", "data.batch_size=256", "schedule.microbatches=4", "--why")
    told = text(capsys, *words)
    assert max(map(len, told.splitlines())) <= 80
    assert "why this layout:\n  named by the request: pipeline 4" in told
