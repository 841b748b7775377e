"""1-bit optimizers in the engine: their exchange between replicas, local gradients, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.engine.engine import Engine
from runner.engine.update.reducer import LocalGradients
from runner.engine.update.replicas import ReplicaExchange
from runner.errors import Problem, RequestError
from runner.model.layers import StageModule
from runner.model.tags import named_parameters
from runner.optim.kinds.onebit import OneBitOptimizer
from runner.optim.states.master import MasterWeights

__all__ = ["OwnErrors", "attach_compression", "compressing", "load_errors", "own_errors"]


def compressing(optimizer: Optimizer) -> OneBitOptimizer | None:
    """The 1-bit optimizer that this is or that updates its master weights; None for another optimizer."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
    inner = optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer
    return inner if isinstance(inner, OneBitOptimizer) else None


def attach_compression(optimizer: Optimizer, engine: Engine, crossing: Sequence[str]) -> ReplicaExchange | None:
    """Let a 1-bit optimizer exchange momentum between the stage's replicas instead of gradients.

    Args:
        crossing: names of the model's weights that several stages hold. Every rank is given them, not only the ranks
            that hold one, so that all refuse together.

    Returns:
        the exchange; None if nothing is compressed, or there is one replica.

    Raises:
        RequestError: stages share weights, whose gradients must be summed over all ranks that hold them.
    """
    onebit = compressing(optimizer)
    if onebit is None:
        return None
    if crossing:
        why = f"{crossing[0]} is on several stages, whose gradients are summed over all of its replicas"
        rule = "must exchange whole gradients for weights that stages share"
        raise RequestError([Problem("optimizer.name", onebit.option, rule, why, "optimizer=adamw")])
    engine.reduce_by(lambda gradients: LocalGradients(lambda: onebit.compresses))
    if len(engine.view.replicas) == 1:
        return None
    exchange = ReplicaExchange(engine.transport, engine.view.replicas)
    onebit.attach(exchange)
    return exchange


@dataclass(frozen=True)
class OwnErrors:
    """The compression errors of one rank, on the CPU.

    Args:
        names, sizes: names and sizes of the parameters, in the order in which they are concatenated.
        replica: number of the rank's replica.
        worker: [elements].
        server: [elements of its chunk].
    """

    names: list[str]
    sizes: list[int]
    replica: int
    worker: Tensor
    server: Tensor


def own_errors(optimizer: Optimizer, stages: Mapping[int, StageModule], replica: int) -> OwnErrors | None:
    """The compression errors of this rank; None if nothing is compressed, or no step was taken."""
    onebit = compressing(optimizer)
    if onebit is None or not onebit.state:
        return None
    worker, server = (
        error.clone().cpu() for error in (onebit.compression.worker_error, onebit.compression.server_error)
    )
    return OwnErrors(*_layout(optimizer, stages), replica, worker, server)


def load_errors(
    optimizer: Optimizer, stages: Mapping[int, StageModule], replica: int, saved: Iterable[OwnErrors]
) -> None:
    """Load this rank's compression errors.

    With another number of replicas, each takes the mean, so that the total error stays the same.

    Args:
        saved: the compression errors of all ranks of the run that was saved.
    """
    onebit = compressing(optimizer)
    if onebit is None:
        return
    names, _ = _layout(optimizer, stages)
    worker, server = _by_name(saved, set(names))
    if not worker:
        return
    replicas = onebit.num_replicas
    rows = [worker[name] for name in names]
    own = [row[replica] if len(row) == replicas else torch.stack(row).mean(dim=0) for row in rows]
    onebit.compression.load(torch.cat(own), torch.cat([server[name] for name in names]))


def _by_name(saved: Iterable[OwnErrors], wanted: Set[str]) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """Worker errors (for each replica [elements]) and server errors ([elements]) of stages with a ``wanted`` name."""
    by_stage: dict[tuple[str, ...], list[OwnErrors]] = {}
    for part in saved:
        if not wanted.isdisjoint(part.names):
            by_stage.setdefault(tuple(part.names), []).append(part)
    worker: dict[str, list[Tensor]] = {}
    server: dict[str, Tensor] = {}
    for names, replicas in by_stage.items():
        replicas.sort(key=lambda part: part.replica)
        sizes = replicas[0].sizes
        rows = zip(*(torch.split(part.worker, sizes) for part in replicas), strict=True)
        worker |= {name: list(row) for name, row in zip(names, rows, strict=True)}
        chunks = torch.split(torch.cat([part.server for part in replicas]), sizes)
        server |= dict(zip(names, chunks, strict=True))
    return worker, server


def _layout(optimizer: Optimizer, stages: Mapping[int, StageModule]) -> tuple[list[str], list[int]]:
    """Names and sizes of the parameters, in the order in which the optimizer concatenates them."""
    named: dict[Any, str] = {parameter: name for name, parameter in named_parameters(stages).items()}
    given = (parameter for group in optimizer.param_groups for parameter in group["params"])
    held = [parameter for parameter in given if parameter in named]  # a stage that trains nothing has an empty one
    return [named[parameter] for parameter in held], [parameter.numel() for parameter in held]
