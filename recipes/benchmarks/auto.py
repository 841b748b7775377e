"""``schedule=auto`` against every named schedule that fits, on the GPT: who takes the shortest step.

    python -m runner.recipes.benchmarks.auto [--ranks 2] [--microbatches 8] [--rounds 6]

The plan of ``runner plan`` chooses, from the layers' seconds on this machine. All contestants run in the same processes
in turn, cut into equal numbers of layers. What auto chose is not compared with itself, where it has a name.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profiling.model import profile_model
from runner.recipes.benchmarks.pipelines import OneProcess, Pipeline, RunnerPipeline
from runner.recipes.benchmarks.prediction import overrides_of
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.benchmarks.result import Figure, figure, publish
from runner.recipes.benchmarks.rounds import Seconds, take_turns
from runner.recipes.benchmarks.two_stages import require_equal, shared_losses
from runner.recipes.benchmarks.workload import GptSize, cross_entropy, gpt_batches, gpt_layers, make_adamw
from runner.schedule.catalogue.registry import SEARCHED
from runner.schedule.values import Schedule

__all__ = ["compare", "contestants", "figures", "main"]

_AUTO = "auto"
_ALONE = "one process beside a copy"
_OVER_SHARE = 1.05
_BATCHES = 2
_SEED = 0
_SAMPLES_OF_MICROBATCH = 4


def contestants(ranks: int, microbatches: int) -> tuple[dict[str, Schedule], RunPlan]:
    """The order that auto chose and those of the other named schedules that can run and fit; and auto's plan."""
    overrides = overrides_of("gpt", ranks=ranks, microbatches=microbatches, steps=_BATCHES, seconds=0.0)
    overrides += [f"parallelism.pipeline={ranks}", f"schedule.microbatches={microbatches}", "device=cpu"]
    chosen = _plan([*overrides, "schedule=auto"])
    found = {_AUTO: chosen.schedule}
    for spec in SEARCHED:
        try:
            plan = _plan([*overrides, f"schedule={spec.name}"])
        except RequestError:
            continue  # there is no such order of so many ranks and micro-batches
        if plan.fits and plan.schedule.actions != chosen.schedule.actions:
            found[spec.name] = plan.schedule
    return found, chosen


def _plan(overrides: list[str]) -> RunPlan:
    config = resolve(overrides)
    return make_plan(config, profile_model(config))


def compare(
    size: GptSize, schedules: Mapping[str, Schedule], *, samples: int, rounds: int, steps: int
) -> dict[str, Any]:
    """As one rank: ``seconds`` per step, and ``losses`` of the first steps, by contestant.

    Raises:
        RuntimeError: the contestants do not compute the same losses.
    """
    batches = gpt_batches(size, samples, _BATCHES)
    pipelines: dict[str, Pipeline] = {
        name: RunnerPipeline(
            gpt_layers(size, _SEED), cross_entropy, make_adamw, schedule.microbatches, schedule=schedule
        )
        for name, schedule in schedules.items()
    }
    microbatches = schedules[_AUTO].microbatches
    pipelines[_ALONE] = OneProcess(gpt_layers(size, _SEED), cross_entropy, make_adamw, microbatches)
    losses = {name: shared_losses(*map(one.step, batches)) for name, one in pipelines.items()}
    require_equal(losses)
    cycles = {name: itertools.cycle(batches) for name in pipelines}
    turns = {
        name: (lambda name=name, pipeline=pipeline: pipeline.step(next(cycles[name])))
        for name, pipeline in pipelines.items()
    }
    return {
        "seconds": take_turns(turns, warm_rounds=1, rounds=rounds, steps=steps, meet=dist.barrier),
        "losses": losses,
    }


def figures(seconds: Seconds, ranks: int) -> list[Figure]:
    """Auto's time over that of each other, round by round, the shortest first, which auto must not be longer than.

    Args:
        seconds: of a step, by contestant and round.
        ranks: the whole model's step in one process over this number is the share of one rank.
    """
    others = sorted(seconds.keys() - {_AUTO, _ALONE}, key=lambda name: median(seconds[name]))
    limits = {name: 1.0 if place == 0 else None for place, name in enumerate(others)}
    found = [figure(f"auto / {name}", _ratios(seconds[_AUTO], seconds[name]), limits[name]) for name in others]
    share = [each / ranks for each in seconds[_ALONE]]
    return [*found, figure(f"auto / (one process / {ranks})", _ratios(seconds[_AUTO], share), _OVER_SHARE)]


def _ratios(own: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(own, others, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6, help="turns of each that count")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/auto.json"))
    options = parser.parse_args()
    schedules, chosen = contestants(options.ranks, options.microbatches)
    print(chosen.advice[0])
    samples = _SAMPLES_OF_MICROBATCH * options.microbatches
    run = partial(compare, GptSize(), schedules, samples=samples, rounds=options.rounds, steps=options.steps)
    measured = run_ranks(options.ranks, run)
    publish(
        "auto",
        settings={
            "model": GptSize().kwargs(),
            "ranks": options.ranks,
            "microbatches": options.microbatches,
            "samples": samples,
            "chosen": chosen.advice[0],
        },
        seconds=measured["seconds"],
        figures=figures(measured["seconds"], options.ranks),
        losses=measured["losses"],
        path=options.out,
    )


if __name__ == "__main__":
    main()
