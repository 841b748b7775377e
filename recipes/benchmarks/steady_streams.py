"""Asynchronous schedules as a user runs them: how busy their full pipeline is, and the step that was predicted.

    python -m runner.recipes.benchmarks.steady_streams [--schedule pipedream pipedream_2bw] [--rounds 2]
    python -m runner.recipes.benchmarks.steady_streams --schedule pipemare --rounds 3

Eight stages sleep, so that a machine of any number of cores runs them. ``runner train`` starts each schedule in turn,
round after round. Steps in which the pipeline fills or drains, or in which memory is measured, do not count; 64
mini-batches do. Their mean time gives the utilisation, the sleep of a rank over its time, and is compared with the
prediction that the run wrote before its first step. A schedule has as few micro-batches per mini-batch as keep its
pipeline full.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from runner.errors import RequestError
from runner.recipes.benchmarks.prediction import overrides_of, run_and_read
from runner.recipes.benchmarks.result import Figure, figure, publish
from runner.schedule.catalogue.registry import build
from runner.schedule.lowering.program import lower
from runner.schedule.simulation.clock import Costs
from runner.schedule.steady import period
from runner.schedule.stream import streams_of

__all__ = ["SCHEDULES", "figures", "fewest_microbatches", "main", "measure"]

SCHEDULES = ("pipedream", "pipedream_2bw")
_LEAST_UTILISATION = 0.97
_TARGET = 0.05
_UNITS = 3  # that a rank sleeps for each micro-batch: in the forward, and for each of two gradients


def fewest_microbatches(name: str, ranks: int) -> int:
    """The fewest micro-batches per mini-batch with which no rank waits in the steady state, if messages take no time.

    Raises:
        ValueError: no number up to four times the ranks is enough.
    """
    for microbatches in range(1, 4 * ranks + 1):
        try:
            schedule = build(name, ranks=ranks, microbatches=microbatches)
        except RequestError:  # the schedule needs more
            continue
        if period(schedule, Costs()) <= _UNITS * microbatches:
            return microbatches
    raise ValueError(f"{name}: the pipeline of {ranks} ranks is never full")


def measure(name: str, *, ranks: int, minibatches: int, seconds: float) -> dict[str, Any]:
    """One run: ``predicted`` and ``measured`` seconds per mini-batch of a full pipeline, its ``sleep``, and ``losses``.

    Args:
        name: a schedule.
        ranks: stages.
        minibatches: optimizer steps that count.
        seconds: that a stage sleeps in a forward, and as long for each of two gradients.
    """
    microbatches = fewest_microbatches(name, ranks)
    overlap = streams_of(lower(build(name, ranks=ranks, microbatches=microbatches)))[0].overlap
    before, after = 2 + 2 * overlap + ranks, overlap + 1  # memory is measured in all but ``ranks`` of the first ones
    steps = before + minibatches + after
    sizes = {"ranks": ranks, "microbatches": microbatches, "steps": steps}
    words = overrides_of("sleeping", **sizes, seconds=seconds, layers_per_rank=1)
    layout = [f"schedule={name}", f"parallelism.pipeline={ranks}", f"schedule.microbatches={microbatches}"]
    more = ["partition=uniform", "optimizer=sgd", "optimizer.lr=0.001", f"trainer.max_steps={steps}"]
    read = run_and_read([*words, *layout, *more], warm_steps=before)
    return {
        "predicted": read["predicted"],
        "measured": mean(read["measured"][:minibatches]),
        "sleep": _UNITS * microbatches * seconds,
        "microbatches": microbatches,
        "losses": read["losses"],
    }


def figures(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[Figure]:
    """Of each schedule: the share of time in which a rank does not sleep, and how far the prediction is off."""
    made = []
    for name in rounds[0]:
        runs = [one[name] for one in rounds]
        waiting = [1.0 - run["sleep"] / run["measured"] for run in runs]
        errors = [abs(run["predicted"] / run["measured"] - 1.0) for run in runs]
        made.append(figure(f"{name}: 1 - steady utilisation", waiting, 1.0 - _LEAST_UTILISATION))
        made.append(figure(f"{name}: |predicted / measured - 1|", errors, _TARGET))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=64, help="that count, of each run")
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of a stage's forward")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/steady_streams.json"))
    options = parser.parse_args()
    sizes = {"ranks": options.ranks, "minibatches": options.minibatches, "seconds": options.milliseconds / 1000}
    rounds = []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}, load {os.getloadavg()[0]:.1f} ...", flush=True)
        rounds.append({name: measure(name, **sizes) for name in options.schedule})
    seconds = {
        f"{name} {what}": [one[name][what] for one in rounds]
        for name in options.schedule
        for what in ("predicted", "measured", "sleep")
    }
    publish(
        "steady_streams",
        settings={**sizes, "microbatches": {name: rounds[0][name]["microbatches"] for name in options.schedule}},
        seconds=seconds,
        figures=figures(rounds),
        losses={name: rounds[0][name]["losses"] for name in options.schedule},
        path=options.out,
    )


if __name__ == "__main__":
    main()
