"""What a group of ranks has exchanged belongs to nobody else when the layers go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.engine.transport.alone import AloneTransport
from runner.engine.transport.tensor_group import TensorGroup


class Done:
    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        return self._tensors

    def is_completed(self) -> bool:
        return True


class Holding(AloneTransport):
    """A transport whose thread still has the tensors of a collective that is done."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.held: list[Tensor] = []

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Any:
        self.held.append(tensor)
        return Done([])

    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Any:
        parts = [tensor.clone() for _ in group]
        self.held += [tensor, *parts]
        return Done(parts)


@pytest.mark.parametrize("gathers", [False, True])
def test_a_thread_has_let_go_of_tensors_before_they_are_used(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would be alive beyond their last use, and a peak would be above its plan."""
    transport, pauses = Holding(), list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            transport.held.clear()

    monkeypatch.setattr("runner.engine.transport.tensor_group.time.sleep", pause)
    group, value = TensorGroup(transport, (0, 1)), torch.arange(6.0)
    found = group.all_gather(value, 0) if gathers else group.all_reduce(value)
    assert len(pauses) == 3
    assert torch.equal(found, torch.cat([value, value]) if gathers else value)
