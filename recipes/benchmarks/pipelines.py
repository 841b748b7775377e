"""The same layers, cut into the same stages, under three engines: the runner's, torch's and DeepSpeed's.

All accumulate the mean loss of a step's micro-batches and update once. Every rank makes its contestant with the same
arguments and calls :meth:`step` with the same batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.engine.engine import Engine, EngineOptions
from runner.engine.rank_view import RankView
from runner.engine.transport.base import Transport
from runner.engine.transport.delayed import DelayedTransport
from runner.engine.transport.processes import ProcessTransport
from runner.engine.transport.sockets import SocketTransport
from runner.engine.window import StepBatch
from runner.model.layers import build_stage, layers_of
from runner.model.tags import tags_of
from runner.model.ties import find_ties
from runner.optim.states.backup import OptimizerBackup
from runner.plan.layout.batches import split_sizes
from runner.plan.layout.topology import Topology
from runner.recipes.benchmarks.workload import Batch
from runner.schedule.catalogue.registry import build
from runner.schedule.generators.one_directional.forward_only import forward_only
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.lowering.program import lower
from runner.schedule.values import Schedule
from runner.strategy.zero.stage import start_deepspeed

__all__ = ["DeepSpeedPipeline", "LossFunction", "OneProcess", "Pipeline", "RunnerPipeline", "TorchPipeline"]

LossFunction = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

_CPU = torch.device("cpu")
_LONGEST_WAIT_SECONDS = 120.0
_OF_ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")  # torch's; the others take a list
_V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Pipeline(Protocol):
    """One rank of a contestant."""

    def step(self, batch: Batch) -> float | None:
        """One optimizer step; the loss, at least on the last rank."""
        ...


def _layers_of_stage(stage: int, stages: int, layers: int) -> tuple[int, int]:
    """First and last layer of a stage; sizes differ by one at most, the larger ones come first."""
    ends = list(itertools.accumulate(split_sizes(layers, stages), initial=0))
    return ends[stage], ends[stage + 1] - 1


class RunnerPipeline:
    """The runner's engine.

    Args:
        schedule: by name, or itself.
        delay_seconds: added to every message.
        link: what the transport is put behind, in place of that delay.
        post_validation: ranks do not wait for each other before they update.
        sockets: short messages go over Unix sockets, as they do in a run; otherwise all go over Gloo.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss: LossFunction,
        make_optimizer: MakeOptimizer,
        microbatches: int,
        *,
        schedule: str | Schedule = "1f1b",
        delay_seconds: float = 0.0,
        link: Callable[[Transport], Transport] | None = None,
        post_validation: bool = False,
        sockets: bool = True,
    ) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if isinstance(schedule, str):
            schedule = build(schedule, ranks=ranks, microbatches=microbatches)
        order = fuse_backwards(schedule)
        microbatches = order.microbatches  # as they are computed
        sources = layers_of(nn.Sequential(*layers), seed=0)
        partition = [_layers_of_stage(stage, order.stages, len(layers)) for stage in range(order.stages)]
        stages = {stage: build_stage(sources, *partition[stage]) for stage in order.stages_of(rank)}
        self._has_first, self._has_last = 0 in stages, order.stages - 1 in stages
        topology = Topology.grid(ranks, 1, placement=order.rows)
        holders = partial(topology.holders, shard=0)  # layers are whole
        groups = [tuple(range(ranks)), *map(holders, range(order.stages))]
        transport: Transport = (
            SocketTransport(groups, timeout_seconds=_LONGEST_WAIT_SECONDS)
            if sockets
            else ProcessTransport(_CPU, groups, timeout_seconds=_LONGEST_WAIT_SECONDS)
        )
        if link is not None:
            transport = link(transport)
        elif delay_seconds:
            transport = DelayedTransport(transport, delay_seconds=delay_seconds, bytes_per_second=None)
        view = RankView.of(topology, rank, microbatches=microbatches)
        tags = tags_of(
            stages,
            ties=find_ties(sources),
            partition=partition,
            ranks_of_stage=holders,
            later_copies=view.later_copies,
        )
        self.engine = Engine(
            view=view,
            training=lower(order),
            forward_only=lower(forward_only(order, microbatches)),
            stages=stages,
            loss=loss,
            transport=transport,
            options=EngineOptions(microbatches, post_validation=post_validation),
            tags=tags,
        )
        parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
        optimizer = make_optimizer(parameters)
        self.engine.attach_optimizer(optimizer.step, backup=OptimizerBackup(optimizer))

    def step(self, batch: Batch) -> float | None:
        return self.engine.submit(self.part_of(batch))[-1].loss

    def part_of(self, batch: Batch) -> StepBatch:
        """What this rank sees of a step's batch."""
        inputs, targets = batch
        return StepBatch(
            inputs if self._has_first else None,
            targets if self._has_last else None,
            len(inputs) if self._has_first or self._has_last else None,
        )


class OneProcess:
    """The whole model on every rank, each for itself: one process beside a copy of it."""

    def __init__(
        self, layers: Sequence[nn.Module], loss: LossFunction, make_optimizer: MakeOptimizer, microbatches: int
    ) -> None:
        self._model, self._loss = nn.Sequential(*layers), loss
        self._microbatches = microbatches
        self._optimizer = make_optimizer(list(self._model.parameters()))

    def step(self, batch: Batch) -> float | None:
        self._optimizer.zero_grad()
        total = 0.0
        for inputs, targets in zip(*(tensor.tensor_split(self._microbatches) for tensor in batch), strict=True):
            loss = self._loss(self._model(inputs), targets) / self._microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self._optimizer.step()
        return total


class TorchPipeline:
    """A schedule of ``torch.distributed.pipelining``.

    Args:
        schedule: its class, e.g. ``Schedule1F1B``; ``ScheduleInterleavedZeroBubble`` of one chunk is ZB-H1.
        chunks: stages per rank.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss: LossFunction,
        make_optimizer: MakeOptimizer,
        microbatches: int,
        *,
        schedule: str = "Schedule1F1B",
        chunks: int = 1,
    ) -> None:
        from torch.distributed import pipelining

        rank, ranks = dist.get_rank(), dist.get_world_size()
        stages = chunks * ranks
        numbers = [rank, stages - 1 - rank] if schedule in _V_SHAPED else [*range(rank, stages, ranks)]
        modules = []
        for number in numbers:
            first, last = _layers_of_stage(number, stages, len(layers))
            modules.append(nn.Sequential(*layers[first : last + 1]))
        parts = [
            pipelining.PipelineStage(module, number, stages, _CPU)
            for module, number in zip(modules, numbers, strict=True)
        ]
        kind = getattr(pipelining, schedule)
        self._schedule = kind(parts[0] if schedule in _OF_ONE_STAGE else parts, microbatches, loss)
        self._has_first, self._has_last = 0 in numbers, stages - 1 in numbers
        self._optimizer = make_optimizer([parameter for module in modules for parameter in module.parameters()])

    def step(self, batch: Batch) -> float | None:
        losses: list[Tensor] = []
        self._optimizer.zero_grad()
        inputs = batch[:1] if self._has_first else ()
        expected: dict[str, Any] = {"target": batch[1], "losses": losses} if self._has_last else {}
        self._schedule.step(*inputs, **expected, return_outputs=False)
        self._optimizer.step()
        return float(torch.stack(losses).detach().mean()) if losses else None


class DeepSpeedPipeline:
    """DeepSpeed's ``PipelineEngine``, without ZeRO, in fp32.

    Raises:
        ImportError: DeepSpeed is not installed.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss: LossFunction,
        make_optimizer: MakeOptimizer,
        microbatches: int,
        *,
        samples: int,
    ) -> None:
        deepspeed = start_deepspeed(torch.device("cpu"), {}, dist.get_rank())
        from deepspeed.pipe import PipelineModule

        module = PipelineModule(
            layers=list(layers), num_stages=dist.get_world_size(), loss_fn=loss, partition_method="uniform"
        )
        settings: dict[str, Any] = {
            "train_batch_size": samples,
            "train_micro_batch_size_per_gpu": samples // microbatches,
            "gradient_clipping": 0.0,  # its default is 1
            "steps_per_print": 1_000_000,
        }
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=make_optimizer(list(module.parameters())), config=settings
        )
        self._microbatches = microbatches

    def step(self, batch: Batch) -> float | None:
        parts = zip(*(tensor.tensor_split(self._microbatches) for tensor in batch), strict=True)
        return float(self._engine.train_batch(iter(parts)))
