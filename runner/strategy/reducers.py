"""What reducers of gradients keep from one step to the next, in checkpoints: by global name, and by replica."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from runner.engine.engine import Engine

logger = logging.getLogger(__name__)

__all__ = ["load_reducer_states", "own_reducer_states"]


def own_reducer_states(engine: Engine, replica: int) -> dict[str, Any] | None:
    """This rank's, as ``{"replica": number, "part": (number, count), "states": {name: {key: tensor}}}``, on the CPU.

    None where none is kept. ``part`` is which part of divided weights the rank has.
    """
    states = {
        name: {key: value.detach().to("cpu", copy=True) for key, value in entries.items()}
        for stage in engine.stages
        for name, entries in engine.gradients[stage].reducer.state_dict().items()
    }
    return {"replica": replica, "part": _part(engine), "states": states} if states else None


def _part(engine: Engine) -> tuple[int, int]:
    ranks = engine.view.shards
    return ranks.index(engine.transport.rank), len(ranks)


def load_reducer_states(engine: Engine, replica: int, replicas: int, saved: Iterable[Mapping[str, Any]]) -> None:
    """Give each reducer its part; with another number of replicas each takes the mean, so that as much is left over.

    Args:
        replica: this rank's place on the data axis.
        replicas: its length.
        saved: what :func:`own_reducer_states` gave on the ranks of the run that was saved, in any order. Where layers
            were divided among another number of ranks, nothing of it fits, which is told.
    """
    saved = list(saved)
    own = [part for part in saved if tuple(part.get("part", (0, 1))) == _part(engine)]
    if saved and not own and not engine.transport.rank:
        logger.warning(
            "what compression had left over is dropped: in the checkpoint another number of ranks divided the layers"
        )
    rows: dict[str, list[Mapping[str, Tensor]]] = {}
    for part in sorted(own, key=lambda part: int(part["replica"])):
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
