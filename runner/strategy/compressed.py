"""1-bit optimizers in the engine: who the replicas are, which gradients stay a replica's own, and their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.engine.engine import Engine
from runner.engine.replicas import ReplicaExchange
from runner.errors import Problem, RequestError
from runner.model.layers import StageModule
from runner.optim.master import MasterWeights
from runner.optim.onebit import OneBitOptimizer

__all__ = ["OwnErrors", "attach_compression", "compressing", "gathered_errors", "load_errors", "own_errors"]


def compressing(optimizer: Optimizer) -> OneBitOptimizer | None:
    """The 1-bit optimizer that this is, or that updates its masters; None where it is another."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
    inner = optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer
    return inner if isinstance(inner, OneBitOptimizer) else None


def attach_compression(optimizer: Optimizer, engine: Engine, tied: Sequence[str]) -> ReplicaExchange | None:
    """Let a 1-bit optimizer exchange momentum between the stage's replicas, and gradients stay where they are.

    Args:
        tied: names of weights that several stages hold.

    Returns:
        the exchange; None where nothing is compressed, or there is one replica.

    Raises:
        RequestError: stages share weights, whose gradients have to be summed over their holders.
    """
    onebit = compressing(optimizer)
    if onebit is None:
        return None
    if tied:
        why = f"{tied[0]} is on several stages, whose gradients are summed over all of its replicas"
        rule = "must exchange whole gradients for weights that stages share"
        raise RequestError([Problem("optimizer.name", onebit.option, rule, why, "optimizer=adamw")])
    for gradients in engine.gradients.values():
        gradients.stays_local = lambda: onebit.compresses
    if len(engine.view.replicas) == 1:
        return None
    exchange = ReplicaExchange(engine.transport, engine.view.replicas)
    onebit.attach(exchange)
    return exchange


@dataclass(frozen=True)
class OwnErrors:
    """What a rank left over, on the CPU.

    Args:
        names, sizes: of the parameters, one after the other.
        replica: its place on the data axis.
        worker: [elements].
        server: [elements of its chunk].
    """

    names: list[str]
    sizes: list[int]
    replica: int
    worker: Tensor
    server: Tensor


def own_errors(optimizer: Optimizer, stages: Mapping[int, StageModule], replica: int) -> OwnErrors | None:
    """This rank's; None where nothing is compressed, or no step was taken."""
    onebit = compressing(optimizer)
    if onebit is None or not onebit.state:
        return None
    worker, server = (
        error.clone().cpu() for error in (onebit.compression.worker_error, onebit.compression.server_error)
    )
    return OwnErrors(*_layout(optimizer, stages), replica, worker, server)


def gathered_errors(parts: Sequence[OwnErrors | None]) -> dict[str, dict[str, Tensor]]:
    """Of all ranks: worker errors [replicas, elements] and server errors [elements] by global name."""
    by_stage: dict[tuple[str, ...], list[OwnErrors]] = {}
    for part in parts:
        if part is not None:
            by_stage.setdefault(tuple(part.names), []).append(part)
    found: dict[str, dict[str, Tensor]] = {"worker": {}, "server": {}}
    for names, replicas in by_stage.items():
        replicas.sort(key=lambda part: part.replica)
        sizes = replicas[0].sizes
        worker = torch.split(torch.stack([part.worker for part in replicas]), sizes, dim=1)
        server = torch.split(torch.cat([part.server for part in replicas]), sizes)
        found["worker"] |= {name: rows.clone() for name, rows in zip(names, worker, strict=True)}
        found["server"] |= {name: row.clone() for name, row in zip(names, server, strict=True)}
    return found if found["worker"] else {}


def load_errors(
    optimizer: Optimizer, stages: Mapping[int, StageModule], replica: int, saved: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Take this rank's part; with another number of replicas each takes the mean, so that as much is left over."""
    onebit = compressing(optimizer)
    if onebit is None or not saved:
        return
    names, _ = _layout(optimizer, stages)
    replicas = onebit.num_replicas
    rows = [saved["worker"][name] for name in names]
    own = [row[replica] if len(row) == replicas else row.mean(dim=0) for row in rows]
    onebit.compression.load(torch.cat(own), torch.cat([saved["server"][name] for name in names]))


def _layout(optimizer: Optimizer, stages: Mapping[int, StageModule]) -> tuple[list[str], list[int]]:
    """Names and sizes of the parameters, as the optimizer has them one after the other."""
    named: dict[Any, str] = {
        parameter: module.global_name(name)
        for module in stages.values()
        for name, parameter in module.named_parameters()
    }
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [named[parameter] for parameter in held], [parameter.numel() for parameter in held]
