"""A training set that is smaller than a step is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from runner.config.compose.resolve import resolve
from runner.training.data.loading import StepSampler, few_samples_note, no_validation_note


@pytest.mark.parametrize(("samples", "told"), [(7, "a step takes 7 samples"), (8, None), (9, None)])
def test_a_step_of_more_samples_than_there_are_is_told(samples: int, told: str | None) -> None:
    sampler = StepSampler(samples, 8, data=1, replica=0, shuffle=False, seed=0)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(samples)), batch_sampler=sampler)
    note = few_samples_note(loader, 8)
    assert (note is None) == (told is None)
    assert told is None or told in str(note)


def test_validations_without_a_set_are_told() -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(1)))
    asked, default = resolve(["model=mlp", "trainer.val_every=5"]), resolve(["model=mlp"])
    assert no_validation_note(loader, asked) is None
    assert no_validation_note(None, default) is None
    note = str(no_validation_note(None, asked))
    assert note.startswith(f"trainer.val_every=5 is not read: {asked.data.target} returns no validation set")
