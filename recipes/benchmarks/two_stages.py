"""Two ranks: the best of the runner against the best of torch.distributed.pipelining and DeepSpeed, on one GPT.

Each engine runs in the same two processes in turn, with each of its schedules: 1F1B with one stage per rank, ZB-V with
two. The best is the one with the least median.
"""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial
from pathlib import Path
from statistics import median
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
_OURS = ("1f1b", "zb_h1", "zb_v")
_TORCH = ("Schedule1F1B", "ScheduleZBVZeroBubble")
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
    losses = {name: shared_losses(*map(one.step, batches)) for name, one in contestants.items()}
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

    found: dict[str, Pipeline] = {f"runner {name}": RunnerPipeline(*fresh(), schedule=name) for name in _OURS}
    found |= {f"torch {name}": TorchPipeline(*fresh(), schedule=name) for name in _TORCH}
    if with_deepspeed:
        found["deepspeed"] = DeepSpeedPipeline(*fresh(), samples=samples)
    return found


def shared_losses(*losses: float | None) -> list[float]:
    """The losses on every rank; only those that have the last stage know them."""
    known = [math.nan if loss is None else loss for loss in losses]
    of_ranks = [torch.empty(len(known), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, torch.tensor(known, dtype=torch.float64))
    return [next(loss for loss in column if not math.isnan(loss)) for column in torch.stack(of_ranks, 1).tolist()]


def require_equal(losses: dict[str, list[float]]) -> None:
    """Raise RuntimeError unless all contestants have the first one's losses, to rounding."""
    first = next(iter(losses))
    for name, values in losses.items():
        pairs = zip(values, losses[first], strict=True)
        if not all(math.isclose(own, other, rel_tol=_ROUNDING) for own, other in pairs):
            raise RuntimeError(f"{name} computes other losses than {first}: {values} and {losses[first]}")


def figures(seconds: Seconds) -> list[Figure]:
    """The time of the best of the runner over that of the best of each other engine, and over all, round by round."""

    def best(engine: str) -> str:
        return min((name for name in seconds if name.startswith(engine)), key=lambda name: median(seconds[name]))

    own = best("runner")
    others = [best(engine) for engine in ("torch", "deepspeed") if any(name.startswith(engine) for name in seconds)]
    return [
        figure(f"{own} / {other}", [a / b for a, b in zip(seconds[own], seconds[other], strict=True)], 1.0)
        for other in others
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each that count")
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
