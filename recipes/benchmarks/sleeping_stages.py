"""Eight stages that sleep, 1F1B: what an engine adds to the schedule, on a machine of any number of cores.

A stage's forward sleeps once and its backward twice as long, for the gradients of its input and of its weights. The
figure is the time of a step above its compute, over its compute: (stages - 1) / microbatches where nothing else costs
time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
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

__all__ = ["SleepingLayer", "compare", "main"]

_WIDTH = 16
_TARGET = 0.46


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.seconds = seconds
        time.sleep(seconds)
        return value * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        value, weight = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return gradients[0] * weight, (gradients[0] * value).sum(0), None


class SleepingLayer(nn.Module):
    """Multiplies [batch, width] by its weight [width], and takes its time.

    Args:
        seconds: of the forward; the backward takes twice that.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(value, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return slept


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def compare(seconds: float, *, microbatches: int, rounds: int) -> dict[str, Any]:
    """As one rank: ``seconds`` per step, and ``losses`` of the first step, by contestant.

    Raises:
        RuntimeError: the contestants do not compute the same losses.
    """
    make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    batch = (torch.rand(microbatches, _WIDTH, generator=generator), torch.ones(microbatches, _WIDTH))

    def fresh() -> tuple[Any, ...]:
        layers = [SleepingLayer(seconds) for _ in range(dist.get_world_size())]
        return layers, _loss, make_optimizer, microbatches

    contestants: dict[str, Pipeline] = {"runner": RunnerPipeline(*fresh()), "torch": TorchPipeline(*fresh())}
    losses = {name: shared_losses([pipeline.step(batch)]) for name, pipeline in contestants.items()}
    require_equal(losses)
    turns = {name: partial(pipeline.step, batch) for name, pipeline in contestants.items()}
    taken = take_turns(turns, warm_rounds=1, rounds=rounds, steps=1, meet=dist.barrier)
    return {"seconds": taken, "losses": losses}


def figures(taken: Seconds, compute: float) -> list[Figure]:
    """Each contestant's time above ``compute`` seconds, over ``compute``, and the runner's over torch's; by round."""
    above = {name: [(one - compute) / compute for one in values] for name, values in taken.items()}
    ratios = [own / other for own, other in zip(above["runner"], above["torch"], strict=True)]
    return [
        figure("runner: above compute / compute", above["runner"], _TARGET),
        figure("torch: above compute / compute", above["torch"]),
        figure("runner / torch, above compute", ratios, 1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="steps of each that count")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="of a stage's forward")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/sleeping_stages.json"))
    options = parser.parse_args()
    seconds = options.milliseconds / 1000
    run = partial(compare, seconds, microbatches=options.microbatches, rounds=options.rounds)
    measured = run_ranks(options.stages, run)
    publish(
        "sleeping_stages",
        settings={
            "stages": options.stages,
            "microbatches": options.microbatches,
            "seconds_forward": seconds,
            "seconds_backward": 2 * seconds,
            "theory": (options.stages - 1) / options.microbatches,
        },
        seconds=measured["seconds"],
        figures=figures(measured["seconds"], 3 * seconds * options.microbatches),
        losses=measured["losses"],
        path=options.out,
    )


if __name__ == "__main__":
    main()
