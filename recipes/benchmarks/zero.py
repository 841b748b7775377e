"""ZeRO: a training run against the same DeepSpeed engine in a hand-written loop, on two ranks.

Both train the same GPT on the same batches with the same DeepSpeed configuration. The run goes the way of every run,
through Lightning, with its record; a callback lets the loop take turns in the same processes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from runner.config.compose.resolve import resolve
from runner.config.deepspeed import deepspeed_settings
from runner.config.schema import RunConfig
from runner.launch.run.prepare import prepare, write_request
from runner.recipes.benchmarks.plain_loop import SEED, WARM_TURNS
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.benchmarks.result import figure, publish
from runner.recipes.benchmarks.rounds import Seconds
from runner.recipes.benchmarks.two_stages import require_equal
from runner.recipes.benchmarks.workload import GptSize, cross_entropy, gpt_batches, gpt_layers, make_adamw
from runner.training.run import run_rank

__all__ = ["main", "measure"]

_RANKS = 2
_TARGET = 1.03


class DeepSpeedLoop:
    """The hand-written loop: DeepSpeed's engine, its ``backward`` and its ``step``."""

    def __init__(self, size: GptSize, settings: dict[str, Any], samples: int, microbatches: int, steps: int) -> None:
        import deepspeed

        self.losses: list[float] = []
        self._microbatches = microbatches
        model = torch.nn.Sequential(*gpt_layers(size, SEED))
        accumulated = {"gradient_accumulation_steps": microbatches}
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=make_adamw(list(model.parameters())),
            config=settings | accumulated,
            dist_init_required=False,
        )
        self._batches = iter(gpt_batches(size, samples, steps))

    def step(self) -> None:
        """The next batch's optimizer step; keeps its loss over both ranks."""
        inputs, targets = (each.tensor_split(_RANKS)[dist.get_rank()] for each in next(self._batches))
        total = torch.zeros(())
        pairs = zip(inputs.tensor_split(self._microbatches), targets.tensor_split(self._microbatches), strict=True)
        for some, wanted in pairs:
            loss = cross_entropy(self._engine(some), wanted)
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach() / self._microbatches
        dist.all_reduce(total)
        self.losses.append(total.item() / _RANKS)


class Turns(Callback):
    """Lets the loop take a turn after every few steps of the run, and times both; ranks meet before and after."""

    def __init__(self, loop: Any, turn: int) -> None:
        self.seconds: Seconds = {"runner": [], "hand-written": []}
        self.losses: list[float] = []
        self.loop: Any = None
        self._make, self._turn = loop, turn
        self._since = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        strategy: Any = trainer.strategy
        self.losses.append(strategy.last_step.loss)
        if len(self.losses) % self._turn:
            return
        dist.barrier()
        begun = time.perf_counter()
        if self.loop is None:
            self.loop = self._make()
        with torch.enable_grad():
            for _ in range(self._turn):
                self.loop.step()
        dist.barrier()
        ended = time.perf_counter()
        if len(self.losses) > self._turn * WARM_TURNS:
            self.seconds["runner"].append((begun - self._since) / self._turn)
            self.seconds["hand-written"].append((ended - begun) / self._turn)
        self._since = time.perf_counter()


def measure(size: GptSize, folder: str, *, stage: int, samples: int, microbatches: int, rounds: int, turn: int) -> Any:
    """As one rank: ``seconds`` per step, and ``losses``, by contestant."""
    steps = (rounds + WARM_TURNS) * turn
    config = _config(size, folder, stage, samples, microbatches, steps)
    run_dir = Path(folder) / "run"
    if dist.get_rank() == 0:
        run_dir.mkdir()
        write_request(config, prepare(config, place_is_made=True), run_dir, command="benchmark")
    dist.barrier()
    settings = deepspeed_settings(config, accelerated=False)
    turns = Turns(partial(DeepSpeedLoop, size, settings, samples, microbatches, steps), turn)
    run_rank(config, run_dir, watchers=[turns])
    assert turns.loop is not None
    return {"seconds": turns.seconds, "losses": {"runner": turns.losses, "hand-written": turns.loop.losses}}


def _config(size: GptSize, folder: str, stage: int, samples: int, microbatches: int, steps: int) -> RunConfig:
    sizes = size.kwargs()
    return resolve(
        [
            *("model=gpt", "data=random_tokens", f"parallelism.data={_RANKS}", f"zero.stage={stage}", "device=cpu"),
            *(f"model.kwargs.{key}={value}" for key, value in sizes.items()),
            *(f"data.kwargs.{key}={sizes[key]}" for key in ("sequence_length", "vocab_size")),
            f"data.kwargs.samples={steps * samples}",
            f"data.kwargs.val_samples={samples}",
            f"data.batch_size={samples}",
            "data.shuffle=false",
            f"schedule.microbatches={microbatches}",
            f"trainer.max_steps={steps}",
            f"seed={SEED}",
            f"run_dir={folder}/run",
            "logger=csv",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each that count")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--samples", type=int, default=16, help="of a step, over both ranks")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/zero.json"))
    options = parser.parse_args()
    size = GptSize()
    asked = {name: getattr(options, name) for name in ("stage", "samples", "microbatches", "rounds")}
    with tempfile.TemporaryDirectory() as folder:
        measured = run_ranks(_RANKS, partial(measure, size, folder, turn=options.steps, **asked))
    require_equal(measured["losses"])
    seconds: Seconds = measured["seconds"]
    ratios = [own / other for own, other in zip(seconds["runner"], seconds["hand-written"], strict=True)]
    publish(
        "zero",
        settings={"model": size.kwargs(), "steps_per_turn": options.steps, "threads": 1, **asked},
        seconds=seconds,
        figures=[figure("runner / hand-written", ratios, _TARGET)],
        losses=measured["losses"],
        path=options.out,
    )


if __name__ == "__main__":
    main()
