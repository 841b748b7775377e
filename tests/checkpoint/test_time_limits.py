"""Ranks that wait for one another: as long as a step may take, and in a save as long as a save may."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from runner.config.compose.resolve import resolve
from runner.launch.rank import process_group


def test_messages_may_take_as_long_as_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in which ranks must meet, 60 s, is no limit for a stage that computes longer."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    config = resolve(["model=mlp", "launcher.step_timeout_seconds=900"])
    with process_group(config, HashStore()):
        assert dist.group.WORLD is not None
        gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert gloo.options._timeout == timedelta(seconds=910)
