"""Two stages, 1F1B: the runner against torch.distributed.pipelining and DeepSpeed, same layers, same cut, same batches.

Each engine runs in the same two processes in turn.
"""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.recipes.benchmarks.pipelines import DeepSpeedPipeline, Pipeline, RunnerPipeline, TorchPipeline
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.benchmarks.result import Figure, figure, publish
from runner.recipes.benchmarks.rounds import Seconds, take_turns
from runner.recipes.benchmarks.workload import GptSize, cross_entropy, gpt_batches, gpt_layers, make_adamw

__all__ = ["compare", "main", "require_equal", "shared_losses"]

_RANKS = 2
_BATCHES = 4
_SEED = 0
_ROUNDING = 1e-4  # of losses after a few updates, relative: the engines sum gradients in different orders


def compare(
    size: GptSize, *, microbatches: int, samples: int, rounds: int, steps: int, with_deepspeed: bool
) -> dict[str, Any]:
    """As one rank: ``seconds`` per step, and ``losses`` of the first steps, by contestant.

    Raises:
        RuntimeError: the contestants do not compute the same losses.
    """
    contestants = _contestants(size, microbatches, samples, with_deepspeed)
    batches = gpt_batches(size, samples, _BATCHES)
    losses = {name: shared_losses([one.step(batch) for batch in batches]) for name, one in contestants.items()}
    require_equal(losses)
    cycles = {name: itertools.cycle(batches) for name in contestants}
    turns = {
        name: (lambda name=name, pipeline=pipeline: pipeline.step(next(cycles[name])))
        for name, pipeline in contestants.items()
    }
    seconds = take_turns(turns, warm_rounds=1, rounds=rounds, steps=steps, meet=dist.barrier)
    return {"seconds": seconds, "losses": losses}


def _contestants(size: GptSize, microbatches: int, samples: int, with_deepspeed: bool) -> dict[str, Pipeline]:
    def fresh() -> tuple[Any, ...]:
        return gpt_layers(size, _SEED), cross_entropy, make_adamw, microbatches

    found: dict[str, Pipeline] = {"runner": RunnerPipeline(*fresh()), "torch": TorchPipeline(*fresh())}
    if with_deepspeed:
        found["deepspeed"] = DeepSpeedPipeline(*fresh(), samples=samples)
    return found


def shared_losses(losses: list[float | None]) -> list[float]:
    """The last rank's losses on every rank."""
    values = torch.tensor([math.nan if loss is None else loss for loss in losses], dtype=torch.float64)
    dist.broadcast(values, dist.get_world_size() - 1)
    return [float(value) for value in values]


def require_equal(losses: dict[str, list[float]]) -> None:
    """Raise RuntimeError unless all contestants have the runner's losses, to rounding."""
    for name, values in losses.items():
        pairs = zip(values, losses["runner"], strict=True)
        if not all(math.isclose(own, runner, rel_tol=_ROUNDING) for own, runner in pairs):
            raise RuntimeError(f"{name} computes other losses than the runner: {values} and {losses['runner']}")


def figures(seconds: Seconds) -> list[Figure]:
    """The runner's time over each other's, round by round."""
    return [
        figure(f"runner / {name}", [own / other for own, other in zip(seconds["runner"], others, strict=True)], 1.0)
        for name, others in seconds.items()
        if name != "runner"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each that count")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=32, help="of a step")
    parser.add_argument("--without-deepspeed", action="store_true", help="torch alone")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/two_stages.json"))
    options = parser.parse_args()
    size = GptSize()
    run = partial(
        compare,
        size,
        microbatches=options.microbatches,
        samples=options.samples,
        rounds=options.rounds,
        steps=options.steps,
        with_deepspeed=not options.without_deepspeed,
    )
    measured = run_ranks(_RANKS, run)
    publish(
        "two_stages",
        settings={
            "model": size.kwargs(),
            "ranks": _RANKS,
            "microbatches": options.microbatches,
            "samples": options.samples,
            "steps_per_turn": options.steps,
            "threads_per_rank": 1,
        },
        seconds=measured["seconds"],
        figures=figures(measured["seconds"]),
        losses=measured["losses"],
        path=options.out,
    )


if __name__ == "__main__":
    main()
