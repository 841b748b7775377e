"""Steps under chance: Varuna's run-time rule beside its static order and 1F1B, simulated and with stages that sleep.

    python -m runner.recipes.benchmarks.jitter [--amount 0.3] [--delay 20] [--steps 40]
    python -m runner.recipes.benchmarks.jitter --simulated --steps 200

Every forward, every gradient and every message takes its time times 1 + amount times an exponential number of mean 1.
1F1B takes part twice: as it is, and with its layers recomputed in their backwards, so that it keeps as little as Varuna
does. The figure is the 90th percentile of a step's time over 1F1B's. The numbers are seeded; in the simulator every
contestant's actions meet the same ones, in the engine they are drawn in the order of each stage's calls.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.engine.transport.base import Channel, Handle, Transport
from runner.engine.transport.delayed import DelayedTransport
from runner.recipes.benchmarks.pipelines import RunnerPipeline
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.benchmarks.result import Figure, figure, publish
from runner.recipes.benchmarks.rounds import Seconds, take_turns
from runner.recipes.benchmarks.sleeping_stages import SleepingLayer, mean_square, sleeping_batch
from runner.recipes.benchmarks.two_stages import require_equal, shared_losses
from runner.schedule.catalogue.registry import build
from runner.schedule.simulation.clock import Costs, Jitter, simulate
from runner.schedule.simulation.opportunistic import realised
from runner.schedule.values import Schedule

__all__ = ["CONTESTANTS", "Contestant", "Setting", "figures", "main", "measure", "play"]


@dataclass(frozen=True)
class Contestant:
    """A schedule, and how it is run.

    Args:
        schedule: by name.
        opportunistic: forwards may go before backwards whose gradients are late.
        recomputed: every layer keeps its input alone and is computed again in its backward.
    """

    schedule: str
    opportunistic: bool = False
    recomputed: bool = False

    def order(self, ranks: int, microbatches: int) -> Schedule:
        return build(self.schedule, ranks=ranks, microbatches=microbatches, opportunistic=self.opportunistic or None)


CONTESTANTS = {
    "1f1b": Contestant("1f1b"),
    "1f1b recomputed": Contestant("1f1b", recomputed=True),
    "varuna": Contestant("varuna"),
    "varuna opportunistic": Contestant("varuna", opportunistic=True),
}
_OURS = "varuna opportunistic"


@dataclass(frozen=True)
class Setting:
    """Seconds of a rank's share of a forward (and of each gradient) and of a message; how much chance adds."""

    ranks: int
    microbatches: int
    seconds: float
    delay_seconds: float
    amount: float


def play(setting: Setting, steps: int) -> Seconds:
    """Simulated seconds of each contestant's steps, each step with chance of its own."""
    found: Seconds = {}
    for name, contestant in CONTESTANTS.items():
        order = contestant.order(setting.ranks, setting.microbatches)
        backward = 3 if contestant.recomputed else 2
        costs = Costs(setting.seconds, backward * setting.seconds, comm=setting.delay_seconds)
        chances = [Jitter(setting.amount, seed) for seed in range(steps)]
        found[name] = [simulate(realised(order, costs, chance), costs, chance).makespan for chance in chances]
    return found


class _Chance:
    """Factors in the order of the calls."""

    def __init__(self, amount: float, seed: str) -> None:
        self._amount, self._random = amount, random.Random(seed)

    def factor(self) -> float:
        return 1.0 + self._amount * self._random.expovariate(1.0)


class _ChanceLink(DelayedTransport):
    """Messages that arrive after a time of chance, in order."""

    def __init__(self, inner: Transport, setting: Setting) -> None:
        super().__init__(inner, delay_seconds=setting.delay_seconds, bytes_per_second=None)
        self._seconds, self._chance = setting.delay_seconds, _Chance(setting.amount, f"link {inner.rank}")

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        is_data = channel in (Channel.ACTIVATION, Channel.GRADIENT)
        self._delay = self._seconds * self._chance.factor() if is_data else 0.0
        return super().send(tensor, peer, channel)


class _ChanceLayer(nn.Module):
    """A sleeping layer whose calls take times of chance."""

    def __init__(self, setting: Setting, stage: int, recomputed: bool) -> None:
        super().__init__()
        self._inner = SleepingLayer(setting.seconds)
        self._setting, self._recomputed = setting, recomputed
        self._chance = _Chance(setting.amount, f"stage {stage}")

    def forward(self, value: Tensor) -> Tensor:
        if not self._recomputed:
            return self._computed(value)
        made: Tensor = checkpoint(self._computed, value, use_reentrant=False)
        return made

    def _computed(self, value: Tensor) -> Tensor:
        self._inner.seconds = self._setting.seconds * self._chance.factor()
        made: Tensor = self._inner(value)
        return made


def measure(setting: Setting, steps: int) -> dict[str, Any]:
    """As one rank: ``seconds`` of each contestant's steps, and ``losses`` of the first step.

    Raises:
        RuntimeError: the contestants do not compute the same losses.
    """
    make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01)
    batch = sleeping_batch(setting.microbatches)
    contestants = {
        name: RunnerPipeline(
            [_ChanceLayer(setting, stage, contestant.recomputed) for stage in range(setting.ranks)],
            mean_square,
            make_optimizer,
            setting.microbatches,
            schedule=contestant.order(setting.ranks, setting.microbatches),
            link=partial(_ChanceLink, setting=setting) if setting.delay_seconds else None,
        )
        for name, contestant in CONTESTANTS.items()
    }
    losses = {name: shared_losses(pipeline.step(batch)) for name, pipeline in contestants.items()}
    require_equal(losses)
    turns = {name: partial(pipeline.step, batch) for name, pipeline in contestants.items()}
    return {"seconds": take_turns(turns, warm_rounds=0, rounds=steps, steps=1, meet=dist.barrier), "losses": losses}


def figures(kind: str, seconds: Seconds) -> list[Figure]:
    """The 90th percentile of each contestant's steps, and ours over the others'."""
    most = {name: statistics.quantiles(values, n=10)[-1] for name, values in seconds.items()}
    made = [figure(f"{kind}: {name}, p90 of a step's seconds", [most[name]]) for name in most]
    others = [name for name in most if name != _OURS]
    return [*made, *(figure(f"{kind}: {_OURS} / {name}, p90", [most[_OURS] / most[name]], 1.0) for name in others)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="the simulator alone")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a rank's share of a forward")
    parser.add_argument("--delay", type=float, default=20.0, help="milliseconds of a message")
    parser.add_argument("--amount", type=float, default=0.3, help="mean of what chance adds, over the time itself")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/jitter.json"))
    options = parser.parse_args()
    setting = Setting(
        options.ranks, options.microbatches, options.milliseconds / 1000, options.delay / 1000, options.amount
    )
    played = play(setting, options.steps)
    seconds = {f"simulated {name}": values for name, values in played.items()}
    made, losses = figures("simulated", played), {}
    if not options.simulated:
        measured = run_ranks(setting.ranks, measure, setting, options.steps)
        made += figures("measured", measured["seconds"])
        seconds |= measured["seconds"]
        losses = measured["losses"]
    publish("jitter", settings=asdict(setting), seconds=seconds, figures=made, losses=losses, path=options.out)


if __name__ == "__main__":
    main()
