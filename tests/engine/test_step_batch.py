"""A step's batch is no pair, which a user's hook that unpacks it is told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from runner.engine.window import StepBatch


def test_a_hook_that_unpacks_its_batch_is_told_where_things_are() -> None:
    batch: Any = StepBatch(torch.zeros(4, 2), torch.zeros(4), samples=4)
    with pytest.raises(TypeError, match=r"batch\.inputs on ranks of the first stage"):
        _inputs, _targets = batch
    with pytest.raises(TypeError, match="and no pair"):
        batch[0]
    assert not isinstance(batch, Iterable), "libraries would look into it as into a list"
