"""ZeRO from a user's own script is the plain loop, and is refused where ``runner train`` refuses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from narrow import gradient
from own_script import Model, data
from torch import nn
from torch.utils.data import DistributedSampler

from runner.api import OffloadConfig, ZeroConfig, ZeroStrategy
from runner.errors import RequestError

HERE = Path(__file__).parent


def plain_loop() -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Losses and weights of two epochs over what two replicas load; the validation's loss at the end."""
    model, samples = Model(), data(32, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samplers: Any = [DistributedSampler(samples, num_replicas=2, rank=rank, shuffle=True, seed=0) for rank in (0, 1)]
    losses = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [list(sampler) for sampler in samplers]
        for start in range(0, 16, 4):
            optimizer.zero_grad()
            total = 0.0
            for order in orders:
                x, y = samples[order[start : start + 4]]
                for part, target in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
                    loss = model.loss(model.net(part), target) * len(part)
                    loss.backward()  # type: ignore[no-untyped-call]  # the library's
                    total += float(loss.detach())
            for parameter in model.parameters():
                gradient(parameter).div_(8)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(total / 8)
    x, y = data(10, 2).tensors
    return losses, model.state_dict(), model.loss(model.net(x), y).item()


@pytest.mark.full
def test_every_stage_is_the_plain_loop_and_goes_on_from_anothers_checkpoint(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *torchrun, str(HERE / "own_zero_script.py"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses, weights, val_loss = plain_loop()
    found = {name: torch.load(tmp_path / f"{name}.pt") for name in ("one", "three", "goes_on")}
    assert found["one"]["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["three"]["losses"] + found["goes_on"]["losses"] == pytest.approx(losses, rel=1e-5)
    for name in ("one", "goes_on"):
        assert found[name]["val_loss"] == pytest.approx(val_loss, rel=1e-5)
        for key, weight in weights.items():
            torch.testing.assert_close(found[name]["weights"][key], weight, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}")


@pytest.mark.parametrize(
    ("zero", "offload", "layout", "trainer", "path"),
    [
        ({}, {}, {}, {}, "zero.stage"),
        ({"stage": 3}, {}, {"stages": 2}, {}, "zero.stage"),
        ({"stage": 1}, {"parameters": "cpu"}, {}, {}, "offload.parameters"),
        ({"stage": 2}, {"optimizer": "cpu"}, {}, {"precision": "bf16-true"}, "offload.optimizer"),
        ({"stage": 2}, {"optimizer": "cpu", "delay_from": 1}, {}, {}, "offload.delay_from"),
        ({"stage": 2}, {}, {}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "trainer.grad_clip_val"),
        ({"stage": 1}, {}, {"stages": 2, "schedule": "zb_h1", "microbatches": 4}, {}, "schedule.name"),
    ],
)
def test_refused_before_anything_starts(
    zero: dict[str, Any], offload: dict[str, Any], layout: dict[str, Any], trainer: dict[str, Any], path: str
) -> None:
    strategy = ZeroStrategy(ZeroConfig(**zero), OffloadConfig(**offload), **layout)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "barebones": False,
    }
    fitting = pl.Trainer(strategy=strategy, devices=1, accelerator="cpu", max_epochs=1, **quiet, **trainer)
    with pytest.raises(RequestError) as refused:
        strategy.require_possible(fitting)
    assert path in str(refused.value)
