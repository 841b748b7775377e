"""A GPT of two stages whose layers two ranks divide: the runner beside torch's pipelining with DTensors, in turns.

    python -m runner.recipes.tensor.grid_peers [--rounds N] [--write-readme]

Both train the blocks of :mod:`runner.recipes.tensor.peers` on four ranks by 1F1B, from the same weights and on the same
batch, with SGD. torch's stages send to the rank with the same part of the next stage, as the runner's do.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from runner.engine.engine import Engine, EngineOptions
from runner.engine.rank_view import RankView
from runner.engine.transport.processes import ProcessTransport
from runner.engine.transport.tensor_group import TensorGroup
from runner.engine.window import StepBatch
from runner.model.layers import build_stage, layers_of
from runner.model.sharded.group import ShardGroup
from runner.model.sharded.plan import Division
from runner.model.tags import tags_of
from runner.plan.layout.topology import Topology
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.schedules.tables import replace_block
from runner.recipes.tensor.peers import RULES, Block
from runner.schedule.catalogue.registry import build
from runner.schedule.generators.one_directional.forward_only import forward_only
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.lowering.program import lower

__all__ = ["SIZES", "compare", "main", "markdown", "measured"]

SIZES = (
    {"width": 64, "layers": 4, "samples": 8, "tokens": 64, "microbatches": 4},
    {"width": 256, "layers": 4, "samples": 4, "tokens": 128, "microbatches": 4},
)
"""What is compared: samples are those of a step."""

_STAGES, _PARTS, _WARM, _RATE = 2, 2, 2, 1e-3
_CPU = torch.device("cpu")
Step = Callable[[Tensor, Tensor], "float | None"]


def _loss(made: Tensor, wanted: Tensor) -> Tensor:
    return (made - wanted).square().mean()


def compare(sizes: Mapping[str, int], rounds: int) -> list[dict[str, Any]]:
    """A row for each contestant: seconds of a step, and how far its losses are off those of one process."""
    rows: list[dict[str, Any]] = run_ranks(_STAGES * _PARTS, measured, dict(sizes), rounds)
    return [{**sizes, **row} for row in rows]


def measured(sizes: Mapping[str, int], rounds: int) -> list[dict[str, Any]]:
    """One rank's part of :func:`compare`. A step's processor time is that of all ranks, its wall time the longest."""
    torch.manual_seed(0)
    blocks = [Block(sizes["width"]) for _ in range(sizes["layers"])]
    batch, wanted = torch.randn(2, sizes["samples"], sizes["tokens"], sizes["width"])
    made: dict[str, Callable[[list[Block], int], Step]] = {"runner": _by_runner, "torch, DTensor": _by_torch}
    steps = {name: make(copy.deepcopy(blocks), sizes["microbatches"]) for name, make in made.items()}
    expected = _alone(copy.deepcopy(blocks), batch, wanted)
    off = {}
    for name, step in steps.items():
        losses = [step(batch, wanted) for _ in expected]
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, losses)
        last = next(each for each in told if each[0] is not None)
        off[name] = max(abs(one / other - 1) for one, other in zip(last, expected, strict=True))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(_WARM + rounds):
        for name, step in steps.items():
            dist.barrier()
            worked, started = time.process_time(), time.perf_counter()
            step(batch, wanted)
            own = torch.tensor([time.process_time() - worked, time.perf_counter() - started], dtype=torch.float64)
            found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(found, own)
            if number >= _WARM:
                of_ranks = torch.stack(found)
                seconds[name].append((float(of_ranks[:, 0].sum()), float(of_ranks[:, 1].max())))
    return [
        {
            "contestant": name,
            "milliseconds": 1000 * median(worked for worked, _ in taken),
            "wall_milliseconds": 1000 * median(passed for _, passed in taken),
            "off": off[name],
        }
        for name, taken in seconds.items()
    ]


def _alone(blocks: list[Block], batch: Tensor, wanted: Tensor) -> list[float]:
    """The losses of two steps of one process."""
    model, losses = nn.Sequential(*blocks), []
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    for _ in range(2):
        loss = _loss(model(batch), wanted)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _by_runner(blocks: list[Block], microbatches: int) -> Step:
    rank = dist.get_rank()
    order = fuse_backwards(build("1f1b", ranks=_STAGES, microbatches=microbatches))
    topology = Topology.grid(_STAGES, 1, _PARTS)
    place, view = topology.coordinates(rank), RankView.of(topology, rank, microbatches=microbatches)
    division = Division(ShardGroup(_PARTS, place.tensor))
    layers = layers_of(nn.Sequential(*blocks), seed=0)
    division.of_given(layers)
    half = len(blocks) // _STAGES
    partition = [(stage * half, (stage + 1) * half - 1) for stage in range(_STAGES)]
    stages = {stage: build_stage(layers, *partition[stage]) for stage in order.stages_of(place.pipe)}
    groups = [tuple(range(_STAGES * _PARTS))]
    groups += [topology.tensor_group(pipe, 0) for pipe in range(_STAGES)]
    transport = ProcessTransport(_CPU, groups, timeout_seconds=120.0)
    group = TensorGroup(transport, view.shards)
    division.group.exchange = group
    tags = tags_of(
        stages,
        ties=[],
        partition=partition,
        ranks_of_stage=partial(topology.holders, shard=place.tensor),
        later_copies=view.later_copies,
        shards=division.shards,
        is_first_shard=view.is_first_shard,
    )
    engine = Engine(
        view=view,
        training=lower(order),
        forward_only=lower(forward_only(order, microbatches)),
        stages=stages,
        loss=_loss,
        transport=transport,
        options=EngineOptions(microbatches),
        tags=tags,
        tensor_group=group,
    )
    engine.attach_optimizer(torch.optim.SGD([each for own in stages.values() for each in own.parameters()], _RATE).step)
    kept = division  # operators know its group by the name alone

    def step(batch: Tensor, wanted: Tensor) -> float | None:
        first, last = 0 in stages, _STAGES - 1 in stages
        assert kept.group.degree == _PARTS
        given = StepBatch(batch if first else None, wanted if last else None, len(batch))
        return engine.submit(given)[-1].loss

    return step


def _by_torch(blocks: list[Block], microbatches: int) -> Step:
    mesh = init_device_mesh("cpu", (_STAGES, _PARTS), mesh_dim_names=("stages", "parts"))
    stage, half = mesh.get_local_rank("stages"), len(blocks) // _STAGES
    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    own = blocks[stage * half : (stage + 1) * half]
    for block in own:
        parallelize_module(block, mesh["parts"], {name: styles[way]() for name, way in RULES.items()})
    module = nn.Sequential(*own)
    part = pipelining.PipelineStage(module, stage, _STAGES, _CPU, group=mesh.get_group("stages"))
    schedule = pipelining.Schedule1F1B(part, microbatches, _loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=_RATE, foreach=False)

    def step(batch: Tensor, wanted: Tensor) -> float | None:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        if stage == 0:
            schedule.step(batch, return_outputs=False)
        else:
            schedule.step(target=wanted, losses=losses, return_outputs=False)
        optimizer.step()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return step


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    head = "width | samples x tokens | contestant | processor time of a step, all ranks | wall time | loss is off by"
    lines = [f"| {head} |", f"|{' --- |' * 6}"]
    for row in rows:
        times = f"{row['milliseconds']:.1f} ms | {row['wall_milliseconds']:.1f} ms"
        size = f"{row['width']} | {row['samples']} x {row['tokens']}"
        lines.append(f"| {size} | {row['contestant']} | {times} | {row['off']:.0e} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each contestant that are timed")
    parser.add_argument("--write-readme", action="store_true", help="put the table into the README")
    asked = parser.parse_args(arguments)
    made = markdown([row for sizes in SIZES for row in compare(sizes, asked.rounds)])
    made += f"\n\nThe load of the machine's {os.cpu_count()} cores was {os.getloadavg()[0]:.1f} at the end."
    print(made)
    if asked.write_readme:
        replace_block(Path(__file__).parent / "README.md", "grid", made)


if __name__ == "__main__":
    main()
