"""A script whose rank fails ends with the first cause as its last line, whichever rank it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os
import time

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runner.api import PipelineStrategy


class Broken(nn.Module):
    def forward(self, x):
        if os.environ["BREAKS"] == "yes":
            raise ValueError("the layer does not like its input")
        return x


class Model(pl.LightningModule):
    def layers(self):
        first = [lambda: nn.Linear(8, 8), Broken]
        return first + [nn.ReLU, lambda: nn.Linear(8, 4)] if os.environ["WHERE"] == "0" else [
            lambda: nn.Linear(8, 8), nn.ReLU, lambda: nn.Linear(8, 4), Broken]

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    pl.seed_everything(0)
    samples = TensorDataset(torch.randn(16, 8), torch.randint(0, 4, (16,)))
    strategy = PipelineStrategy(stages=2, schedule="1f1b", microbatches=2)
    trainer = pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Model(), DataLoader(samples, batch_size=8))
    print("done")
"""


def start(directory: Path, *words: str, breaks: bool, where: int) -> subprocess.CompletedProcess[str]:
    (directory / "script.py").write_text(SCRIPT, encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "BREAKS": "yes" if breaks else "no",
        "WHERE": str(where),
        "TMPDIR": str(directory),
    }
    return subprocess.run(
        [sys.executable, *words, "script.py"],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )


@pytest.mark.costly
def test_the_first_cause_is_the_last_line(tmp_path: Path) -> None:
    where = 1
    done = start(tmp_path, breaks=True, where=where)
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith(f"rank {where} failed first: "), done.stderr
    assert "the layer does not like its input" in last
    assert not list(tmp_path.glob("runner_*")), "the folder of the reports is removed"
