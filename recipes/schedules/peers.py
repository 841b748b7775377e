"""The engine beside torch.distributed.pipelining and DeepSpeed: same model, same split, same order, same run.

    python -m runner.recipes.schedules.peers [--write-readme]
    python -m runner.recipes.schedules.peers --gpt           (a GPT in two processes, which compute)

Every contestant takes its turn in the same processes. By default stages sleep, so that what is measured is the schedule
and what an engine adds to it, whatever the machine's number of cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.environment import environment
from runner.recipes.benchmarks.pipelines import DeepSpeedPipeline, LossFunction, Pipeline, RunnerPipeline, TorchPipeline
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.benchmarks.rounds import Seconds, take_turns
from runner.recipes.benchmarks.sleeping_stages import SleepingLayer, mean_square, sleeping_batch
from runner.recipes.benchmarks.two_stages import require_equal, shared_losses
from runner.recipes.benchmarks.workload import Batch, GptSize, cross_entropy, gpt_batches, gpt_layers, make_adamw
from runner.recipes.schedules.computed import COSTS
from runner.recipes.schedules.tables import heading, replace_block
from runner.schedule.catalogue.registry import build
from runner.schedule.simulation.clock import simulate

__all__ = ["PAIRS", "Pair", "markdown", "measure_gpt", "measure_sleeping"]

_HERE = Path(__file__).parent
_GPT_SAMPLES = 32  # of a step


@dataclass(frozen=True)
class Pair:
    """One order and who else runs it.

    Args:
        ours: the schedule's name.
        other: a class of torch.distributed.pipelining, or ``deepspeed``.
        chunks: per rank.
    """

    ours: str
    other: str
    chunks: int = 1


PAIRS = (
    Pair("gpipe", "ScheduleGPipe"),
    Pair("1f1b", "Schedule1F1B"),
    Pair("1f1b", "deepspeed"),
    Pair("interleaved_1f1b", "ScheduleInterleaved1F1B", 2),
    Pair("looped_bfs", "ScheduleLoopedBFS", 2),
    Pair("zb_h1", "ScheduleInterleavedZeroBubble"),
    Pair("zb_v", "ScheduleZBVZeroBubble", 2),
    Pair("dualpipe_v", "ScheduleDualPipeV", 2),
)
"""torch's interleaved zero bubble, with one stage per rank, is ZB-H1."""


def measure_sleeping(
    ranks: int, *, microbatches: int, seconds: float, rounds: int, pairs: Sequence[Pair] = PAIRS
) -> Seconds:
    """Seconds per step of stages that sleep, by contestant and round.

    Args:
        seconds: of a rank's share of a forward, and as long for each of its gradients.

    Raises:
        RuntimeError: the contestants do not compute the same losses.
    """
    run = partial(_sleeping_rank, microbatches=microbatches, seconds=seconds, rounds=rounds, pairs=pairs)
    taken: Seconds = run_ranks(ranks, run)
    return taken


def measure_gpt(
    ranks: int, *, microbatches: int, rounds: int, size: GptSize | None = None, pairs: Sequence[Pair] = PAIRS
) -> Seconds:
    """The same of the benchmarks' GPT.

    Raises:
        RuntimeError: the contestants do not compute the same losses.
    """
    run = partial(_gpt_rank, size or GptSize(), microbatches=microbatches, rounds=rounds, pairs=pairs)
    taken: Seconds = run_ranks(ranks, run)
    return taken


def _sleeping_rank(*, microbatches: int, seconds: float, rounds: int, pairs: Sequence[Pair]) -> Seconds:
    def layers(chunks: int) -> list[nn.Module]:
        return [SleepingLayer(seconds / chunks) for _ in range(chunks * dist.get_world_size())]

    sgd: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01)
    contestants = _contestants(pairs, layers, mean_square, sgd, microbatches, samples=microbatches)
    return _take_turns(contestants, [sleeping_batch(microbatches)], rounds)


def _gpt_rank(size: GptSize, *, microbatches: int, rounds: int, pairs: Sequence[Pair]) -> Seconds:
    def layers(chunks: int) -> list[nn.Module]:
        return gpt_layers(size, seed=0)

    contestants = _contestants(pairs, layers, cross_entropy, make_adamw, microbatches, samples=_GPT_SAMPLES)
    return _take_turns(contestants, gpt_batches(size, _GPT_SAMPLES, 2), rounds)


def _contestants(
    pairs: Sequence[Pair],
    layers: Callable[[int], list[nn.Module]],
    loss: LossFunction,
    make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    microbatches: int,
    *,
    samples: int,
) -> dict[str, Pipeline]:
    """Both sides of every pair, each with layers of its own."""
    found: dict[str, Pipeline] = {}
    for pair in pairs:
        given = (loss, make_optimizer, microbatches)
        if pair.ours not in found:
            found[pair.ours] = RunnerPipeline(layers(pair.chunks), *given, schedule=pair.ours)
        if pair.other == "deepspeed":
            found[pair.other] = DeepSpeedPipeline(layers(pair.chunks), *given, samples=samples)
        else:
            found[pair.other] = TorchPipeline(layers(pair.chunks), *given, schedule=pair.other, chunks=pair.chunks)
    return found


def _take_turns(contestants: dict[str, Pipeline], batches: Sequence[Batch], rounds: int) -> Seconds:
    require_equal({name: shared_losses(*map(one.step, batches)) for name, one in contestants.items()})
    cycles = {name: itertools.cycle(batches) for name in contestants}
    turns = {
        name: (lambda name=name, pipeline=pipeline: pipeline.step(next(cycles[name])))
        for name, pipeline in contestants.items()
    }
    return take_turns(turns, warm_rounds=0, rounds=rounds, steps=1, meet=dist.barrier)


def markdown(taken: Seconds, pairs: Sequence[Pair], *, ranks: int, microbatches: int, seconds: float | None) -> str:
    """One line per pair; medians over the rounds, the ratio of the two in each round.

    Args:
        seconds: that a rank's share of a forward sleeps; None of real work, whose pure compute is not known.
    """
    what = "a GPT" if seconds is None else f"stages that sleep {1000 * seconds:g} ms for F, for I and for W"
    figure = "s" if seconds is None else "above compute / compute"
    lines = [
        f"**{what}, D = {ranks}, T = {microbatches}**",
        "",
        f"| order | chunks | in theory, above compute / compute | runner, {figure} | other | other, {figure} | "
        "runner / other, whole step |",
        "|---|---|---|---|---|---|---|",
    ]
    for pair in pairs:
        own, other = taken[pair.ours], taken[pair.other]
        ratio = median(a / b for a, b in zip(own, other, strict=True))
        played = simulate(build(pair.ours, ranks=ranks, microbatches=microbatches, chunks=pair.chunks), COSTS)
        theory = played.makespan / (microbatches * (COSTS.F + COSTS.B)) - 1
        shown = [median(values) for values in (own, other)]
        if seconds is not None:
            shown = [value / (3 * seconds * microbatches) - 1 for value in shown]
        lines.append(
            f"| {pair.ours} | {pair.chunks} | {theory:.3f} | {shown[0]:.3f} | {pair.other} | {shown[1]:.3f} | "
            f"{ratio:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", action="store_true", help="a GPT in two processes instead of sleeping stages")
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 4 and 8 that sleep, 2 of the GPT")
    parser.add_argument("--microbatches", type=int, help="default: 16 that sleep, 8 of the GPT")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a rank's share of a sleeping forward")
    parser.add_argument("--rounds", type=int, default=4, help="steps of each that count")
    parser.add_argument("--without-deepspeed", action="store_true", help="torch alone")
    parser.add_argument("--out", type=Path, default=Path("outputs/schedules"))
    parser.add_argument("--write-readme", action="store_true", help="put the table into this recipe's README")
    options = parser.parse_args()
    microbatches = options.microbatches or (8 if options.gpt else 16)
    pairs = [pair for pair in PAIRS if not (options.without_deepspeed and pair.other == "deepspeed")]
    seconds = None if options.gpt else options.milliseconds / 1000
    tables, measured, load = [], {}, os.getloadavg()[0]
    for ranks in options.ranks or ([2] if options.gpt else [4, 8]):
        given: dict[str, Any] = {"microbatches": microbatches, "rounds": options.rounds, "pairs": pairs}
        taken = measure_gpt(ranks, **given) if seconds is None else measure_sleeping(ranks, seconds=seconds, **given)
        measured[str(ranks)] = taken
        tables.append(markdown(taken, pairs, ranks=ranks, microbatches=microbatches, seconds=seconds))
    name = "peers-gpt" if options.gpt else "peers"
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment(),
        "load_before": load,
        "settings": {"microbatches": microbatches, "seconds": seconds, "rounds": options.rounds},
        "pairs": [asdict(pair) for pair in pairs],
        "seconds_per_step": measured,
    }
    text = "\n\n".join([heading(document), *tables])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (options.out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(f"{text}\n\nwritten to {options.out}")
    if options.write_readme:
        replace_block(_HERE / "README.md", name, text)


if __name__ == "__main__":
    main()
