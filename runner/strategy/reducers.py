"""What reducers of gradients keep from one step to the next, in checkpoints: by global name, and by replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from runner.engine.engine import Engine

__all__ = ["load_reducer_states", "own_reducer_states"]


def own_reducer_states(engine: Engine, replica: int) -> dict[str, Any] | None:
    """This rank's, as ``{"replica": number, "states": {name: {key: tensor}}}``, on the CPU; None where none is kept."""
    states = {
        name: {key: value.detach().to("cpu", copy=True) for key, value in entries.items()}
        for stage in engine.stages
        for name, entries in engine.gradients[stage].reducer.state_dict().items()
    }
    return {"replica": replica, "states": states} if states else None


def load_reducer_states(engine: Engine, replica: int, replicas: int, saved: Iterable[Mapping[str, Any]]) -> None:
    """Give each reducer its part; with another number of replicas each takes the mean, so that as much is left over.

    Args:
        replica: this rank's place on the data axis.
        replicas: its length.
        saved: what :func:`own_reducer_states` gave on the ranks of the run that was saved, in any order.
    """
    rows: dict[str, list[Mapping[str, Tensor]]] = {}
    for part in sorted(saved, key=lambda part: int(part["replica"])):
        for name, entries in part["states"].items():
            rows.setdefault(name, []).append(entries)
    if not rows:
        return
    state = {name: row[replica] if len(row) == replicas else _mean(row) for name, row in rows.items()}
    for stage in engine.stages:
        names = engine.gradients[stage].names
        engine.gradients[stage].reducer.load_state_dict({name: state[name] for name in names if name in state})


def _mean(row: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([entries[key] for entries in row]).mean(dim=0) for key in row[0]}
