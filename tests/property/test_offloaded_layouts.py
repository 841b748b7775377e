"""``parallelism=auto`` where a layout fits with the host's memory alone: what it prints can be typed, and trains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tensor_models
import torch

from runner.cli.main import main
from runner.launch.run.find_layout import find_layout
from runner.record import RECORD_FILE

_ASKED = (
    "model=custom", "model.target=tensor_models:build", "data=custom", "data.target=tensor_models:data", "loss=custom",
    "loss.target=tensor_models:loss", "data.batch_size=8", "data.shuffle=false", "optimizer.lr=0.01",
    "optimizer.eps=1e-3", "optimizer.weight_decay=0.1", "logger=none", "seed=3",
    "trainer.progress=false", "launcher.watchdog_seconds=null", "trainer.max_steps=2", "parallelism=auto",
    "parallelism.ranks=2", "parallelism.tensor=1", "parallelism.search=quick",
)  # fmt: skip
_ON_GPUS = "hardware=a100_80gb"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the model, which is profiled in this process."""
    shutil.copy(str(tensor_models.__file__), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runner.profiling.model.apart", lambda function, *given: function(*given))
    return tmp_path


def planned(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit status and the document of ``runner plan --json``."""
    status = main(["plan", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def least(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> int:
    """The bytes of the layout that needs least."""
    status, found = planned([*words, "memory_limit=1kB"], capsys)
    assert status == 3
    size = found["nearest"]["peak_memory_bytes"]
    assert isinstance(size, int)
    return size


@pytest.mark.costly
@pytest.mark.parametrize(("fixed", "key"), [([], "offload.optimizer"), (["zero.stage=null"], "offload.activations")])
def test_a_limit_that_only_the_host_satisfies_is_kept(
    fixed: list[str], key: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*_ASKED, _ON_GPUS, *fixed]
    without, with_host = least([*asked, "offload=none"], capsys), least(asked, capsys)
    assert with_host < without
    limited = [*asked, f"memory_limit={(without + with_host) // 2}"]
    assert planned([*limited, "offload=none"], capsys)[0] == 3
    status, found = planned(limited, capsys)
    assert status == 0
    assert key in found["chosen"]
    status, typed = planned(found["request"], capsys)
    assert status == 0
    for figure in ("step_seconds", "peak_memory_bytes", "partition", "fits"):
        assert typed[figure] == found[figure], figure
    assert main(["train", *found["request"], f"run_dir={place / 'run'}"]) == 0
    run = json.loads((place / "run" / RECORD_FILE).read_text(encoding="utf-8"))
    if key == "offload.activations":  # on a CPU, states that were moved are live tensors, too
        assert all(counted <= found["memory_limit_bytes"] for counted in run["peak_memory_bytes"]["measured"])
    losses = torch.tensor([float(each) for each in run["loss"]])
    torch.testing.assert_close(losses, torch.tensor(tensor_models.losses_alone()), rtol=2e-6, atol=2e-6)


@pytest.mark.costly
@pytest.mark.parametrize(
    "words",
    [
        ["hardware=laptop_cpu"],
        [_ON_GPUS, "offload=none"],
        [_ON_GPUS, "offload.optimizer=none"],
        [_ON_GPUS, "parallelism.free=[pipeline,data,zero]"],
    ],
)
def test_nothing_goes_to_a_host_that_is_the_device_or_that_is_not_asked(words: list[str]) -> None:
    found = find_layout([*_ASKED, "memory_limit=1kB", *words])
    assert not found.chosen.fits
    assert not any(key.startswith("offload") for choice in found.chosen.planned for key in choice.keys)
