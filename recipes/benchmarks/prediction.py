"""`runner train` as a user starts it: the step that it predicts before the first one, beside the steps that follow.

    python -m runner.recipes.benchmarks.prediction [--ranks 4] [--schedule gpipe 1f1b zb_h1 zb_v auto]
    python -m runner.recipes.benchmarks.prediction --model gpt --ranks 2

Stages sleep, so that a machine of few cores runs many; ``--model gpt`` takes the GPT, for as many ranks as cores. The
prediction is read from the record that the run wrote before its first step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset, TensorDataset

from runner.recipes.benchmarks.result import figure, publish
from runner.recipes.benchmarks.sleeping_stages import SleepingLayer, mean_square, sleeping_batch
from runner.recipes.benchmarks.workload import GptSize

__all__ = ["loss", "main", "measure", "overrides_of", "sleeping_model", "sleeping_samples"]

_TARGET = 0.10
_WARM_STEPS = 2


def sleeping_model(layers: int, seconds: float) -> nn.Sequential:
    """Of ``layers`` :class:`SleepingLayer`, each of which sleeps ``seconds`` thrice."""
    return nn.Sequential(*(SleepingLayer(seconds) for _ in range(layers)))


def sleeping_samples(samples: int) -> Dataset[Any]:
    """Inputs and targets for it."""
    return TensorDataset(*sleeping_batch(samples))


loss = mean_square


def measure(model: Sequence[str], schedule: str, *, ranks: int, microbatches: int, steps: int) -> dict[str, Any]:
    """Run the command; predicted seconds and the seconds of each step, warm-up left out, and the losses.

    Args:
        model: overrides that say model, data and loss.

    Raises:
        CalledProcessError: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        overrides = [
            *model,
            f"schedule={schedule}",
            f"parallelism.pipeline={ranks}",
            f"schedule.microbatches={microbatches}",
            f"trainer.max_steps={steps + _WARM_STEPS}",
            *("logger=none", "trainer.progress=false", "device=cpu", f"run_dir={run_dir}"),
        ]
        command = [sys.executable, "-m", "runner", "train", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "predicted": record["step_seconds"]["predicted"],
        "measured": [row["seconds"] for row in rows[_WARM_STEPS:]],
        "losses": [row["loss"] for row in rows],
    }


def overrides_of(name: str, *, ranks: int, microbatches: int, steps: int, seconds: float) -> list[str]:
    """Model, data and loss.

    Args:
        name: ``sleeping`` or ``gpt``.
        ranks, microbatches, steps: as in :func:`measure`.
        seconds: that a rank's share of a forward sleeps.
    """
    samples = microbatches * (steps + _WARM_STEPS)
    if name == "gpt":
        sizes = GptSize().kwargs()
        shared = [f"data.kwargs.{key}={sizes[key]}" for key in ("sequence_length", "vocab_size")]
        made = ["model=gpt", "data=random_tokens", *(f"model.kwargs.{key}={value}" for key, value in sizes.items())]
        return [*made, *shared, f"data.kwargs.samples={4 * samples}", f"data.batch_size={4 * microbatches}"]
    module = __spec__.name if __spec__ is not None else __name__
    layers = 4 * ranks
    return [
        *(f"model.target={module}:sleeping_model", f"model.kwargs.layers={layers}"),
        f"model.kwargs.seconds={seconds * ranks / layers}",
        *(f"data.target={module}:sleeping_samples", f"data.kwargs.samples={samples}"),
        *(f"data.batch_size={microbatches}", f"loss.target={module}:loss"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", nargs="+", default=["gpipe", "1f1b", "zb_h1", "zb_v", "auto"])
    parser.add_argument("--model", choices=["sleeping", "gpt"], default="sleeping")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="that count")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a rank's share of a forward")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/prediction.json"))
    options = parser.parse_args()
    sizes = {"ranks": options.ranks, "microbatches": options.microbatches, "steps": options.steps}
    overrides = overrides_of(options.model, **sizes, seconds=options.milliseconds / 1000)
    found = {name: measure(overrides, name, **sizes) for name in options.schedule}
    seconds = {f"{name} predicted": [run["predicted"]] for name, run in found.items()}
    seconds |= {f"{name} measured": run["measured"] for name, run in found.items()}
    errors = {name: [abs(run["predicted"] / step - 1) for step in run["measured"]] for name, run in found.items()}
    publish(
        "prediction",
        settings={"model": options.model, **sizes, "milliseconds": options.milliseconds},
        seconds=seconds,
        figures=[figure(f"{name}: |predicted / measured - 1|", each, _TARGET) for name, each in errors.items()],
        losses={name: run["losses"] for name, run in found.items()},
        path=options.out,
    )


if __name__ == "__main__":
    main()
