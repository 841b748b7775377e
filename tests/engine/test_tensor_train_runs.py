"""A GPT with tensor-train embeddings: stages give what one process gives, and an export has tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from whole_runs import Run, peaks, train

from runner.cli.main import main
from runner.config.compose.resolve import resolve

SMALL = (
    "model=gpt", "embedding=tensor_train", "trainer.max_steps=2", "data.batch_size=8", "logger=none", "device=cpu",
    "model.kwargs.layers=1", "model.kwargs.width=32", "data.kwargs.samples=32", "data.kwargs.val_samples=8",
)  # fmt: skip


def trained(folder: Path, *words: str) -> Run:
    folder.mkdir()
    return train(resolve([*SMALL, "trainer.progress=false", "schedule.microbatches=2", *words]), folder)


@pytest.mark.costly
def test_stages_are_one_process_bit_for_bit_and_the_export_has_tables(tmp_path: Path) -> None:
    two = trained(tmp_path / "two", "parallelism.pipeline=2", "schedule=zb_h1")
    assert two.losses == trained(tmp_path / "one").losses
    for measured, predicted in peaks(two):
        assert 0.99 * predicted <= measured <= predicted
    assert main(["export", str(tmp_path / "two"), str(tmp_path / "dense.safetensors")]) == 0
    weights = load_file(tmp_path / "dense.safetensors")
    assert tuple(weights["0.tokens.weight"].shape) == (512, 32)
    assert not [name for name in weights if "cores" in name]
