"""``Trainer.fit`` from a user's own script equals a plain loop over the same samples, in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from narrow import gradient
from own_script import Model, data
from torch import nn
from torch.utils.data import DistributedSampler

HERE = Path(__file__).parent


def plain_loop() -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """Losses, weights, averages and learning rates of three epochs in one process."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # A threshold of 10 calls every epoch a plateau, whatever the validation gives.
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
    samples = data(29, 1)
    sampler: Any = DistributedSampler(samples, num_replicas=1, rank=0, shuffle=True, seed=0)
    averages = {name: value.clone() for name, value in model.state_dict().items()}
    losses, rates = [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for start in range(0, 29, 8):
            x, y = samples[order[start : start + 8]]
            optimizer.zero_grad()
            total = 0.0
            for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
                loss = model.loss(model.net(part), target) * len(part)
                loss.backward()  # type: ignore[no-untyped-call]  # the library's
                total += float(loss.detach().double())
            for parameter in model.parameters():
                gradient(parameter).div_(len(x))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(total / len(x))
            for name, value in model.state_dict().items():
                averages[name].lerp_(value, 0.5)
        rates.append(optimizer.param_groups[0]["lr"])
        plateau.step(1.0)
    return losses, model.state_dict(), averages, rates


@pytest.mark.costly
def test_fit_validate_test_and_predict(tmp_path: Path) -> None:
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(HERE / "own_script.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        left = json.loads((tmp_path / f"threads{rank}.json").read_text())
        assert not [name for name in left if "gloo" in name], "a thread of Gloo may abort the interpreter's teardown"
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    losses, weights, averages, rates = plain_loop()

    assert ranks[0]["losses"] == ranks[1]["losses"], "the whole loss on every rank"
    assert ranks[0]["losses"] == pytest.approx(losses, rel=1e-5)
    assert ranks[0]["rates"] == ranks[1]["rates"] == pytest.approx(rates)
    saved = torch.load(tmp_path / "weights.pt")
    assert saved["weights"].keys() == weights.keys()
    for name in weights:
        torch.testing.assert_close(saved["weights"][name], weights[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(saved["averages"][name], averages[name], rtol=1e-4, atol=1e-6)

    model = Model()
    model.load_state_dict(weights)
    x, y = data(10, 2).tensors
    expected = model.loss(model.net(x), y).item()
    for rank in ranks:
        assert rank["validate"][0]["val_loss"] == pytest.approx(expected, rel=1e-5)
        assert rank["test"][0]["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert ranks[0]["predictions"] == [None, None], "predictions are on the ranks of the last stage"
    torch.testing.assert_close(torch.cat([torch.tensor(p) for p in ranks[1]["predictions"]]), model.net(x).detach())
    whole = Model.load_from_checkpoint(ranks[0]["checkpoint"], weights_only=False)
    assert whole.net[0].weight.shape == (12, 6)
