"""The same layers, one stage per rank, 1F1B, under three engines: the runner's, torch's and DeepSpeed's.

All accumulate the mean loss of a step's micro-batches and update once. Every rank makes its contestant with the same
arguments and calls :meth:`step` with the same batch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.engine.context import RankView
from runner.engine.engine import Engine, EngineOptions
from runner.engine.transport_processes import ProcessTransport
from runner.engine.window import StepBatch
from runner.model.layers import build_stage, layers_of
from runner.plan.batches import split_sizes
from runner.recipes.benchmarks.workload import Batch
from runner.schedule.generators.forward_only import forward_only
from runner.schedule.lower import lower
from runner.schedule.registry import build

__all__ = ["DeepSpeedPipeline", "LossFunction", "Pipeline", "RunnerPipeline", "TorchPipeline"]

LossFunction = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

_CPU = torch.device("cpu")


class Pipeline(Protocol):
    """One rank of a contestant."""

    def step(self, batch: Batch) -> float | None:
        """One optimizer step; the loss, at least on the last rank."""
        ...


def _own(layers: Sequence[nn.Module]) -> tuple[int, int]:
    """First and last layer of this rank; sizes differ by one at most, the larger ones come first."""
    ends = list(itertools.accumulate(split_sizes(len(layers), dist.get_world_size()), initial=0))
    return ends[dist.get_rank()], ends[dist.get_rank() + 1] - 1


class RunnerPipeline:
    """The runner's engine."""

    def __init__(
        self, layers: Sequence[nn.Module], loss: LossFunction, make_optimizer: MakeOptimizer, microbatches: int
    ) -> None:
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        self._last = ranks - 1
        stage = build_stage(layers_of(nn.Sequential(*layers), seed=0), *_own(layers))
        schedule = build("1f1b", ranks=ranks, microbatches=microbatches)
        pipeline = tuple(range(ranks))
        self.engine = Engine(
            view=RankView(self._rank, pipeline, replicas=(self._rank,), num_stages=ranks, first_microbatch=0),
            training=lower(schedule),
            forward_only=lower(forward_only(schedule, microbatches)),
            stages={self._rank: stage},
            loss=loss,
            transport=ProcessTransport(_CPU, [pipeline]),
            options=EngineOptions(microbatches),
        )
        self.engine.attach_optimizer(make_optimizer(list(stage.parameters())).step)

    def step(self, batch: Batch) -> float | None:
        inputs, targets = batch
        ends = self._rank in (0, self._last)
        part = StepBatch(
            inputs if self._rank == 0 else None,
            targets if self._rank == self._last else None,
            len(inputs) if ends else None,
        )
        return self.engine.submit(part)[-1].loss


class TorchPipeline:
    """``torch.distributed.pipelining.Schedule1F1B``."""

    def __init__(
        self, layers: Sequence[nn.Module], loss: LossFunction, make_optimizer: MakeOptimizer, microbatches: int
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        self._last = ranks - 1
        first, last = _own(layers)
        module = nn.Sequential(*layers[first : last + 1])
        self._schedule = Schedule1F1B(PipelineStage(module, self._rank, ranks, _CPU), microbatches, loss)
        self._optimizer = make_optimizer(list(module.parameters()))

    def step(self, batch: Batch) -> float | None:
        losses: list[Tensor] = []
        self._optimizer.zero_grad()
        inputs = batch[:1] if self._rank == 0 else ()
        expected: dict[str, Any] = {"target": batch[1], "losses": losses} if self._rank == self._last else {}
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
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
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
