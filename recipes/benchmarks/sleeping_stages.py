"""Eight ranks of stages that sleep: what an engine adds to a schedule, on a machine of any number of cores.

    python -m runner.recipes.benchmarks.sleeping_stages [--schedule 1f1b zb_h1 zb_v] [--rounds 4]
    python -m runner.recipes.benchmarks.sleeping_stages --delay 12.5 --schedule 1f1b 1f1b_eager
    python -m runner.recipes.benchmarks.sleeping_stages --ranks 4 \\
        --schedule chimera_concatenation chimera_doubling chimera_halving
    python -m runner.recipes.benchmarks.sleeping_stages --weights function --schedule zb_h1 zb_v
    python -m runner.recipes.benchmarks.sleeping_stages --post-validation --steps 10 --schedule zb_v zb_h2

A rank's share of a forward sleeps, and so do those of the gradients of its input and of its weights; a schedule with
two stages per rank halves them. The figure is the time of a step above its compute, over its compute. Each schedule
runs beside torch's own of the same kind, where there is one; --delay adds to every message of the runner, and leaves
torch, whose messages cannot be delayed, out. --post-validation lets ranks begin a step while others end the one before,
and leaves torch, which has nothing like it, out; the figure is of a step in a row of --steps. With --weights function,
the weights pass a function that saves them before they meet the input; the targets are those of plain products.
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
from runner.schedule.catalogue.registry import build
from runner.schedule.simulation.clock import Costs, simulate
from runner.schedule.values import Schedule

__all__ = ["Kind", "SleepingLayer", "compare", "main", "mean_square", "sleeping_batch"]

_WIDTH = 16
_EAGER_GAIN = 0.93


@dataclass(frozen=True)
class Kind:
    """One schedule and what it is compared with.

    Args:
        torch: the class in torch.distributed.pipelining, or None.
        target: the most time above compute, over compute.
        tiled: the most of it in a row of steps with post-validation.
        chunks: stages per rank.
        variant: of Chimera, whose bubble is compared with its closed form.
    """

    torch: str | None
    target: float | None
    chunks: int = 1
    tiled: float | None = None
    variant: str | None = None


_KINDS = {
    "1f1b": Kind("Schedule1F1B", 0.46),
    "1f1b_eager": Kind(None, None),
    "zb_h1": Kind("ScheduleInterleavedZeroBubble", 0.17),
    "zb_v": Kind("ScheduleZBVZeroBubble", 0.10, chunks=2, tiled=0.03),
    "zb_h2": Kind(None, None),
    "chimera_concatenation": Kind(None, None, variant="concatenation"),
    "chimera_doubling": Kind(None, None, variant="doubling"),
    "chimera_halving": Kind(None, None, variant="halving"),
}
_NEAR_THEORY = 0.02  # of all rank time


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


class _SleepingCube(torch.autograd.Function):
    """The cube of each element of a weight, which is saved; its backward takes its time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        return weight**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0] * 3 * ctx.saved_tensors[0] ** 2, None


class SleepingLayer(nn.Module):
    """``(value + bias) @ weight`` of [batch, width]: sleeps for the forward, and as long for each of the gradients.

    The bias makes every stage's input require a gradient, the first one's too.

    Args:
        seconds: of each.
        of_function: the product is with a function of the weight, which saves it.
    """

    def __init__(self, seconds: float, *, of_function: bool = False) -> None:
        super().__init__()
        self.seconds = seconds
        self.of_function = of_function
        self.bias = nn.Parameter(torch.zeros(_WIDTH))
        self.weight = nn.Parameter(torch.eye(_WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        slept = _Sleep.apply(value + self.bias, self.seconds, self.seconds)  # type: ignore[no-untyped-call, unused-ignore]
        if self.of_function:
            weight = _SleepingCube.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call, unused-ignore]
        else:
            weight = _Sleep.apply(self.weight, 0.0, self.seconds)  # type: ignore[no-untyped-call, unused-ignore]
        made: Tensor = slept @ weight
        return made


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return nn.functional.mse_loss(output, target)


def sleeping_batch(samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of :class:`SleepingLayer`, the same every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(samples, _WIDTH, generator=generator), torch.ones(samples, _WIDTH)


def compare(
    seconds: float,
    *,
    schedules: Sequence[str],
    microbatches: int,
    rounds: int,
    steps: int = 1,
    delay_seconds: float = 0.0,
    post_validation: bool = False,
    of_function: bool = False,
) -> dict[str, Any]:
    """As one rank: ``seconds`` per step, and ``losses`` of the first step, by contestant.

    Args:
        seconds: of a rank's share of a forward, and as long for each gradient.
        of_function: see :class:`SleepingLayer`.

    Raises:
        RuntimeError: the contestants do not compute the same losses.
    """
    make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01)
    batch = sleeping_batch(2 * microbatches)  # so that a micro-batch has two halves
    contestants: dict[str, Pipeline] = {}
    for name in schedules:
        kind = _KINDS[name]

        schedule = _schedule(name, dist.get_world_size(), microbatches)

        def fresh(chunks: int = kind.chunks, parts: int = schedule.parts) -> tuple[Any, ...]:
            share = seconds / (chunks * parts)
            layers = [SleepingLayer(share, of_function=of_function) for _ in range(chunks * dist.get_world_size())]
            return layers, mean_square, make_optimizer, microbatches

        contestants[f"runner {name}"] = RunnerPipeline(
            *fresh(), schedule=schedule, delay_seconds=delay_seconds, post_validation=post_validation
        )
        if kind.torch is not None and not delay_seconds and not post_validation:
            contestants[f"torch {kind.torch}"] = TorchPipeline(*fresh(), schedule=kind.torch, chunks=kind.chunks)
    losses = {name: shared_losses(pipeline.step(batch)) for name, pipeline in contestants.items()}
    require_equal(losses)
    turns = {name: partial(pipeline.step, batch) for name, pipeline in contestants.items()}
    taken = take_turns(turns, warm_rounds=0, rounds=rounds, steps=steps, meet=dist.barrier)
    return {"seconds": taken, "losses": losses}


def _schedule(name: str, ranks: int, microbatches: int) -> Schedule:
    variant = _KINDS[name].variant
    return build("chimera" if variant else name, ranks=ranks, microbatches=microbatches, variant=variant)


def above_theory(
    taken: Seconds, compute: float, schedules: Sequence[str], ranks: int, microbatches: int
) -> list[Figure]:
    """Of each variant of Chimera: its bubble, idle / total, above that of its closed form; by round."""
    made = []
    for name in schedules:
        if _KINDS[name].variant is not None:
            theory = simulate(_schedule(name, ranks, microbatches), Costs()).bubble_ratio
            values = [1 - compute / one - theory for one in taken[f"runner {name}"]]
            made.append(figure(f"runner {name}: bubble above theory ({theory:.3f})", values, _NEAR_THEORY))
    return made


def figures(
    taken: Seconds, compute: float, schedules: Sequence[str], delayed: bool = False, post_validation: bool = False
) -> list[Figure]:
    """Each contestant's time above ``compute`` seconds, over ``compute``, and what is divided by what; by round."""
    above = {name: [(one - compute) / compute for one in values] for name, values in taken.items()}
    made = []
    for name in schedules:
        kind, own = _KINDS[name], above[f"runner {name}"]
        target = None if delayed else kind.tiled if post_validation else kind.target
        made.append(figure(f"runner {name}: above compute / compute", own, target))
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
    parser.add_argument("--steps", type=int, default=1, help="in a row, of which one is the figure")
    parser.add_argument("--post-validation", action="store_true", help="ranks do not wait for each other to update")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="of a rank's share of a forward")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds added to a message")
    parser.add_argument("--weights", choices=["plain", "function"], default="plain", help="what the products are with")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/sleeping_stages.json"))
    options = parser.parse_args()
    seconds = options.milliseconds / 1000
    run = partial(
        compare,
        seconds,
        schedules=options.schedule,
        microbatches=options.microbatches,
        rounds=options.rounds,
        steps=options.steps,
        delay_seconds=options.delay / 1000,
        post_validation=options.post_validation,
        of_function=options.weights == "function",
    )
    measured = run_ranks(options.ranks, run)
    compute = 3 * seconds * options.microbatches
    publish(
        "sleeping_stages",
        settings={
            "ranks": options.ranks,
            "microbatches": options.microbatches,
            "seconds_of_forward_and_of_each_gradient": seconds,
            "delay_seconds": options.delay / 1000,
            "steps": options.steps,
            "post_validation": options.post_validation,
            "weights": options.weights,
        },
        seconds=measured["seconds"],
        figures=[
            *figures(measured["seconds"], compute, options.schedule, options.delay > 0, options.post_validation),
            *above_theory(measured["seconds"], compute, options.schedule, options.ranks, options.microbatches),
        ],
        losses=measured["losses"],
        path=options.out,
    )


if __name__ == "__main__":
    main()
