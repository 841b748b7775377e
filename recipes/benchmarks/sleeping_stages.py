"""Eight ranks of stages that sleep: what an engine adds to a schedule, on a machine of any number of cores.

    python -m runner.recipes.benchmarks.sleeping_stages [--schedule 1f1b zb_h1 zb_v] [--rounds 4]
    python -m runner.recipes.benchmarks.sleeping_stages --delay 12.5 --schedule 1f1b 1f1b_eager

A rank's share of a forward sleeps, and so do those of the gradients of its input and of its weights; a schedule with
two stages per rank halves them. The figure is the time of a step above its compute, over its compute. Each schedule
runs beside torch's own of the same kind, where there is one; --delay adds to every message of the runner, and leaves
torch, whose messages cannot be delayed, out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.recipes.benchmarks.pipelines import Pipeline, RunnerPipeline, TorchPipeline
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.benchmarks.result import Figure, figure, publish
from runner.recipes.benchmarks.rounds import Seconds, take_turns
from runner.recipes.benchmarks.two_stages import require_equal, shared_losses

__all__ = ["Kind", "SleepingLayer", "compare", "main"]

_WIDTH = 16
_EAGER_GAIN = 0.93


@dataclass(frozen=True)
class Kind:
    """One schedule and what it is compared with.

    Args:
        torch: the class in torch.distributed.pipelining, or None.
        target: the most time above compute, over compute.
        chunks: stages per rank.
    """

    torch: str | None
    target: float | None
    chunks: int = 1


_KINDS = {
    "1f1b": Kind("Schedule1F1B", 0.46),
    "1f1b_eager": Kind(None, None),
    "zb_h1": Kind("ScheduleInterleavedZeroBubble", 0.17),
    "zb_v": Kind("ScheduleZBVZeroBubble", 0.10, chunks=2),
}


class _Sleep(torch.autograd.Function):
    """The identity, which takes its time in each direction."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        if forward:
            time.sleep(forward)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class SleepingLayer(nn.Module):
    """``(value + bias) @ weight`` of [batch, width]: sleeps for the forward, and as long for each of the gradients.

    The bias makes every stage's input require a gradient, the first one's too.

    Args:
        seconds: of each.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.bias = nn.Parameter(torch.zeros(_WIDTH))
        self.weight = nn.Parameter(torch.eye(_WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        slept = _Sleep.apply(value + self.bias, self.seconds, self.seconds)  # type: ignore[no-untyped-call]
        weight = _Sleep.apply(self.weight, 0.0, self.seconds)  # type: ignore[no-untyped-call]
        made: Tensor = slept @ weight
        return made


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def compare(
    seconds: float, *, schedules: Sequence[str], microbatches: int, rounds: int, delay_seconds: float
) -> dict[str, Any]:
    """As one rank: ``seconds`` per step, and ``losses`` of the first step, by contestant.

    Args:
        seconds: of a rank's share of a forward, and as long for each gradient.

    Raises:
        RuntimeError: the contestants do not compute the same losses.
    """
    make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    batch = (torch.rand(microbatches, _WIDTH, generator=generator), torch.ones(microbatches, _WIDTH))
    contestants: dict[str, Pipeline] = {}
    for name in schedules:
        kind = _KINDS[name]

        def fresh(chunks: int = kind.chunks) -> tuple[Any, ...]:
            layers = [SleepingLayer(seconds / chunks) for _ in range(chunks * dist.get_world_size())]
            return layers, _loss, make_optimizer, microbatches

        contestants[f"runner {name}"] = RunnerPipeline(*fresh(), schedule=name, delay_seconds=delay_seconds)
        if kind.torch is not None and not delay_seconds:
            contestants[f"torch {kind.torch}"] = TorchPipeline(*fresh(), schedule=kind.torch)
    losses = {name: shared_losses(pipeline.step(batch)) for name, pipeline in contestants.items()}
    require_equal(losses)
    turns = {name: partial(pipeline.step, batch) for name, pipeline in contestants.items()}
    taken = take_turns(turns, warm_rounds=0, rounds=rounds, steps=1, meet=dist.barrier)
    return {"seconds": taken, "losses": losses}


def figures(taken: Seconds, compute: float, schedules: Sequence[str], delayed: bool) -> list[Figure]:
    """Each contestant's time above ``compute`` seconds, over ``compute``, and what is divided by what; by round."""
    above = {name: [(one - compute) / compute for one in values] for name, values in taken.items()}
    made = []
    for name in schedules:
        kind, own = _KINDS[name], above[f"runner {name}"]
        made.append(figure(f"runner {name}: above compute / compute", own, None if delayed else kind.target))
        if (other := above.get(f"torch {kind.torch}")) is not None:
            made.append(figure(f"torch {kind.torch}: above compute / compute", other))
            made.append(figure(f"runner / torch, {name}, above compute", _ratios(own, other), 1.0))
    if {"1f1b", "1f1b_eager"} <= set(schedules):
        ratios = _ratios(taken["runner 1f1b_eager"], taken["runner 1f1b"])
        made.append(figure("1f1b_eager / 1f1b, whole step", ratios, _EAGER_GAIN if delayed else None))
    return made


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", nargs="+", choices=_KINDS, default=["1f1b", "zb_h1", "zb_v"])
    parser.add_argument("--rounds", type=int, default=4, help="steps of each that count")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="of a rank's share of a forward")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds added to a message")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/sleeping_stages.json"))
    options = parser.parse_args()
    seconds = options.milliseconds / 1000
    run = partial(
        compare,
        seconds,
        schedules=options.schedule,
        microbatches=options.microbatches,
        rounds=options.rounds,
        delay_seconds=options.delay / 1000,
    )
    measured = run_ranks(options.ranks, run)
    publish(
        "sleeping_stages",
        settings={
            "ranks": options.ranks,
            "microbatches": options.microbatches,
            "seconds_of_forward_and_of_each_gradient": seconds,
            "delay_seconds": options.delay / 1000,
        },
        seconds=measured["seconds"],
        figures=figures(measured["seconds"], 3 * seconds * options.microbatches, options.schedule, options.delay > 0),
        losses=measured["losses"],
        path=options.out,
    )


if __name__ == "__main__":
    main()
