"""The engine with sockets for messages of up to 64 KiB, and with Gloo for all, in the same processes.

    python -m runner.recipes.benchmarks.messages [--workload gpt] [--rounds 8]

``short``: a GPT whose boundary tensors are 32 KiB, so that every message is short. ``gpt``: the GPT of ``two_stages``,
whose boundary tensors are 512 KiB, so that sizes and losses alone are short. ``sleeping``: eight stages that sleep
10 ms, with messages of a few bytes. The figure is the share of a step that sockets save.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.recipes.benchmarks.pipelines import LossFunction, RunnerPipeline
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.benchmarks.result import Figure, figure, publish
from runner.recipes.benchmarks.rounds import Seconds, take_turns
from runner.recipes.benchmarks.sleeping_stages import SleepingLayer, mean_square, sleeping_batch
from runner.recipes.benchmarks.two_stages import require_equal, shared_losses
from runner.recipes.benchmarks.workload import Batch, GptSize, cross_entropy, gpt_batches, gpt_layers, make_adamw

__all__ = ["WORKLOADS", "Workload", "compare", "figures", "main"]

_SOCKETS, _GLOO = "sockets for short messages", "Gloo for all"
_MICROBATCHES = 8
_BATCHES = 4
_SAMPLES = 32
_SEED = 0


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Args:
        ranks: number of processes, one stage each.
        layers: makes the same layers at each call.
    """

    ranks: int
    layers: Callable[[], Sequence[nn.Module]]
    loss: LossFunction
    make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer]
    batches: Callable[[], Sequence[Batch]]


def _gpt(size: GptSize) -> Workload:
    return Workload(
        2, partial(gpt_layers, size, _SEED), cross_entropy, make_adamw, partial(gpt_batches, size, _SAMPLES, _BATCHES)
    )


def _sleeping(ranks: int, seconds: float) -> Workload:
    return Workload(
        ranks,
        lambda: [SleepingLayer(seconds) for _ in range(ranks)],
        mean_square,
        partial(torch.optim.SGD, lr=0.01),
        lambda: [sleeping_batch(_MICROBATCHES)],
    )


WORKLOADS = {
    "short": _gpt(GptSize(layers=8, width=64, sequence_length=32, heads=4)),
    "gpt": _gpt(GptSize()),
    "sleeping": _sleeping(8, 0.01),
}


def compare(workload: Workload, *, rounds: int, steps: int) -> dict[str, Any]:
    """As one rank: ``seconds`` per step, and ``losses`` of the first steps, with and without sockets.

    Raises:
        RuntimeError: the two do not compute the same losses.
    """
    batches = workload.batches()
    contestants = {
        name: RunnerPipeline(
            workload.layers(), workload.loss, workload.make_optimizer, _MICROBATCHES, sockets=name == _SOCKETS
        )
        for name in (_SOCKETS, _GLOO)
    }
    losses = {name: shared_losses(*map(one.step, batches)) for name, one in contestants.items()}
    require_equal(losses)
    cycles = {name: itertools.cycle(batches) for name in contestants}
    turns = {
        name: (lambda name=name, pipeline=pipeline: pipeline.step(next(cycles[name])))
        for name, pipeline in contestants.items()
    }
    return {
        "seconds": take_turns(turns, warm_rounds=1, rounds=rounds, steps=steps, meet=dist.barrier),
        "losses": losses,
    }


def figures(workload: str, seconds: Seconds) -> list[Figure]:
    """The share of a step that sockets save, round by round."""
    saved = [1 - own / other for own, other in zip(seconds[_SOCKETS], seconds[_GLOO], strict=True)]
    return [figure(f"{workload}: share of a step that sockets save", saved)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="short")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each that count")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/messages.json"))
    options = parser.parse_args()
    measured = run_ranks(WORKLOADS[options.workload].ranks, _measure, options.workload, options.rounds, options.steps)
    publish(
        "messages",
        settings={"workload": options.workload, "microbatches": _MICROBATCHES, "steps_per_turn": options.steps},
        seconds=measured["seconds"],
        figures=figures(options.workload, measured["seconds"]),
        losses=measured["losses"],
        path=options.out,
    )


def _measure(workload: str, rounds: int, steps: int) -> dict[str, Any]:
    """See :func:`compare`; named by text, because a process is handed nothing else."""
    return compare(WORKLOADS[workload], rounds=rounds, steps=steps)


if __name__ == "__main__":
    main()
