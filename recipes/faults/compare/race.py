"""What all contenders of a comparison share: the model, the data, and the kills at the same steps.

It imports no Lightning, because a plain loop under torchrun does not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

__all__ = ["BATCH", "RATE", "Race", "begins", "data", "done_twice", "ended", "kills", "model", "recoveries"]

BATCH = 8
"""Samples of a rank's step."""
RATE = 0.01
_SAMPLES = 512
_WIDTH = 64
_ENDED = "ended.txt"
_KILLED = "killed-"


@dataclass(frozen=True, slots=True)
class Race:
    """What a contender is told.

    Args:
        folder: its own; it keeps checkpoints there.
        steps: how many to take.
        every: a checkpoint is saved after every so many steps.
        seconds: that a rank's forward sleeps in each step.
        ranks: processes, each with a copy of the model.
        kills: ``(step, rank)``; the rank is killed when it begins the step, counted from 1, for the first time.
    """

    folder: str
    steps: int
    every: int
    seconds: float
    ranks: int
    kills: tuple[tuple[int, int], ...]

    def save(self) -> Path:
        """Write it into its folder, and return the file."""
        path = Path(self.folder, "race.json")
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path | str) -> Race:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**values | {"kills": tuple((step, rank) for step, rank in values["kills"])})


def kills(count: int, steps: int, ranks: int, seed: int) -> tuple[tuple[int, int], ...]:
    """``count`` kills at different steps, the same for the same arguments."""
    drawn = random.Random(seed)
    at = sorted(drawn.sample(range(2, steps + 1), count))
    return tuple((step, drawn.randrange(ranks)) for step in at)


def begins(race: Race, rank: int, step: int) -> None:
    """A rank begins a step: kill it, if that is asked for and was not done before."""
    if (step, rank) not in race.kills:
        return
    try:
        with Path(race.folder, f"{_KILLED}{step}").open("x", encoding="utf-8") as file:
            file.write(f"{time.time()}")
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def ended(race: Race, rank: int, step: int) -> None:
    """A rank has ended a step; rank 0 notes it."""
    if rank == 0:
        with Path(race.folder, _ENDED).open("a", encoding="utf-8") as file:
            file.write(f"{step} {time.time()}\n")


def done_twice(race: Race) -> tuple[int, int]:
    """How many steps were done at all, and how often a step was done again."""
    seen = [step for step, _ in _ended_steps(race)]
    return len(set(seen)), len(seen) - len(set(seen))


def recoveries(race: Race) -> list[float]:
    """For each kill, the seconds from it to the end of the first step of the ranks that were started again.

    The surviving ranks may still end a step for the first time that came before the kill. A kill after which nothing
    was done is left out.
    """
    waited = []
    for path in Path(race.folder).glob(f"{_KILLED}*"):
        step, killed = int(path.name.removeprefix(_KILLED)), float(path.read_text(encoding="utf-8"))
        seen: set[int] = set()
        for ended_step, seconds in _ended_steps(race):
            if seconds > killed and (ended_step >= step or ended_step in seen):
                waited.append(seconds - killed)
                break
            seen.add(ended_step)
    return sorted(waited)


def _ended_steps(race: Race) -> list[tuple[int, float]]:
    """The steps that rank 0 has ended, each with the time of its end in seconds since the epoch."""
    path = Path(race.folder, _ENDED)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [(int(step), float(seconds)) for step, seconds in map(str.split, lines)]


class Sleeps(nn.Module):
    """Passes on what it gets after a while, as a larger model would."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta":
            time.sleep(self._seconds)
        return x


def model(seconds: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Sleeps(seconds), nn.Linear(6, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(_SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].tanh())
