"""One process: `runner train` against a hand-written PyTorch loop on the same GPT, batches and optimizer.

The command runs as a user starts it, with the logger of plain_loop.py. After every few steps that logger takes steps of
the plain loop, in the same process, so that both meet the same machine; it times both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner.launch.local.allocator import KEEP_FREED_MEMORY
from runner.recipes.benchmarks.plain_loop import SEED, WARM_TURNS, PlainLoopLogger
from runner.recipes.benchmarks.result import figure, publish
from runner.recipes.benchmarks.rounds import Seconds
from runner.recipes.benchmarks.two_stages import require_equal
from runner.recipes.benchmarks.workload import GptSize

__all__ = ["gpt_command", "main", "measure"]

_TARGET = 1.03


def measure(size: GptSize, *, samples: int, rounds: int, turn: int) -> dict[str, Any]:
    """Run the command; ``seconds`` per step, and ``losses``, by contestant.

    Raises:
        CalledProcessError: the command failed.
    """
    steps = (rounds + WARM_TURNS) * turn
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        sizes = ",".join(f"{key}:{value}" for key, value in size.kwargs().items())
        command = [
            *gpt_command(size, samples, steps, folder),
            f"logger.target={PlainLoopLogger.__module__}:{PlainLoopLogger.__name__}",
            f"+logger.kwargs={{folder:{folder},result:{result},samples:{samples},steps:{steps},turn:{turn}}}",
            f"+logger.kwargs.size={{{sizes}}}",
        ]
        subprocess.run(command, check=True, env=os.environ | KEEP_FREED_MEMORY)
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return measured


def gpt_command(size: GptSize, samples: int, steps: int, folder: str) -> list[str]:
    """``runner train`` with the GPT on one rank, in ``folder``; no logger is chosen."""
    sizes = size.kwargs()
    return [
        *(sys.executable, "-m", "runner", "train", "model=gpt", "data=random_tokens", "parallelism=single"),
        *(f"model.kwargs.{key}={value}" for key, value in sizes.items()),
        f"data.kwargs.samples={steps * samples}",
        f"data.kwargs.val_samples={samples}",
        *(f"data.kwargs.{key}={sizes[key]}" for key in ("sequence_length", "vocab_size")),
        f"data.batch_size={samples}",
        "data.shuffle=false",
        "schedule.microbatches=1",
        f"trainer.max_steps={steps}",
        f"seed={SEED}",
        "device=cpu",
        f"run_dir={folder}/run",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each that count")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--samples", type=int, default=8, help="of a step")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/one_process.json"))
    options = parser.parse_args()
    size = GptSize()
    measured = measure(size, samples=options.samples, rounds=options.rounds, turn=options.steps)
    require_equal(measured["losses"])
    seconds: Seconds = measured["seconds"]
    ratios = [own / plain for own, plain in zip(seconds["runner"], seconds["plain loop"], strict=True)]
    publish(
        "one_process",
        settings={"model": size.kwargs(), "samples": options.samples, "steps_per_turn": options.steps, "threads": 1},
        seconds=seconds,
        figures=[figure("runner / plain loop", ratios, _TARGET)],
        losses=measured["losses"],
        path=options.out,
    )


if __name__ == "__main__":
    main()
