"""`runner train` as a user starts it: the step that it predicts before the first one, beside the steps that follow.

    python -m runner.recipes.benchmarks.prediction [--ranks 4] [--schedule gpipe 1f1b zb_h1 zb_v auto]
    python -m runner.recipes.benchmarks.prediction --model gpt --ranks 2
    python -m runner.recipes.benchmarks.prediction --all

Stages sleep, so that a machine of few cores runs many; ``--model gpt`` takes the GPT, for as many ranks as cores. The
prediction is read from the record that the run wrote before its first step. ``--all`` takes twelve requests of both
kinds, and compares the fullest rank's memory, too: it shall not be above its prediction, nor more than 1 % below.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn
from torch.utils.data import Dataset, TensorDataset

from runner.recipes.benchmarks.result import Figure, figure, publish
from runner.recipes.benchmarks.sleeping_stages import SleepingLayer, mean_square, sleeping_batch
from runner.recipes.benchmarks.workload import GptSize

__all__ = [
    "all_figures",
    "loss",
    "main",
    "measure",
    "overrides_of",
    "run_and_read",
    "sleeping_model",
    "sleeping_samples",
    "twelve",
]

_TARGET = 0.10
_SHORT_TARGET = 0.25  # for steps that are shorter than
_SHORT_SECONDS = 0.05
_MEMORY_TARGET = 0.01
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
    layout = [f"schedule={schedule}", f"parallelism.pipeline={ranks}", f"schedule.microbatches={microbatches}"]
    return run_and_read([*model, *layout, f"trainer.max_steps={steps + _WARM_STEPS}"])


def run_and_read(words: Sequence[str], warm_steps: int = _WARM_STEPS) -> dict[str, Any]:
    """Run ``runner train`` with these overrides; what its record says, as :func:`measure` returns it.

    Args:
        words: the overrides.
        warm_steps: first steps whose seconds are left out.

    Raises:
        CalledProcessError: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        shared = ["logger=none", "trainer.progress=false", "device=cpu", f"run_dir={run_dir}"]
        command = [sys.executable, "-m", "runner", "train", *words, *shared]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "predicted": record["step_seconds"]["predicted"],
        "measured": [row["seconds"] for row in rows[warm_steps:]],
        "losses": [row["loss"] for row in rows],
        "memory": {key: record["peak_memory_bytes"][key] for key in ("predicted", "measured")},
    }


def twelve(steps: int) -> dict[str, list[str]]:
    """The overrides of twelve requests: stages that sleep and stages that compute, one rank to four."""
    sizes: dict[str, int] = {"ranks": 4, "microbatches": 8, "steps": steps}
    sleeping = [*overrides_of("sleeping", **sizes, seconds=0.02), "parallelism.pipeline=4", "schedule.microbatches=8"]
    gpt = overrides_of("gpt", **{**sizes, "ranks": 2}, seconds=0.0)
    pipeline = [*gpt, "parallelism.pipeline=2", "schedule.microbatches=8"]
    mlp = ["model=mlp", "model.kwargs.width=256", "data.batch_size=128"]
    found = {f"sleeping, {name}": [*sleeping, f"schedule={name}"] for name in ("gpipe", "1f1b", "zb_h1", "zb_v")}
    found |= {f"gpt, {name}": [*pipeline, f"schedule={name}"] for name in ("gpipe", "1f1b", "zb_h1")}
    found |= {
        "gpt, one process": [*gpt, "schedule.microbatches=8"],
        "gpt, two replicas": [*gpt, "parallelism.data=2", "schedule.microbatches=4"],
        "gpt, four ranks": [*gpt, "schedule=1f1b", "parallelism.pipeline=4", "schedule.microbatches=8"],
        "mlp, four ranks": [*mlp, "schedule=1f1b", "parallelism.pipeline=4", "schedule.microbatches=8"],
        "the default recipe": ["recipe=rudalle_tiny", "trainer.val_every=null", "report=null", "lr_scheduler=constant"],
    }
    return {name: [*words, f"trainer.max_steps={steps + _WARM_STEPS}"] for name, words in found.items()}


def all_figures(found: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """How far each request's median step and its fullest rank's memory are from their predictions."""
    made = []
    for name, run in found.items():
        taken = median(run["measured"])
        target = _TARGET if taken >= _SHORT_SECONDS else _SHORT_TARGET
        made.append(figure(f"{name}: |predicted / median step - 1|", [abs(run["predicted"] / taken - 1)], target))
    for name, run in found.items():
        off = [own / told - 1 for own, told in zip(run["memory"]["measured"], run["memory"]["predicted"], strict=True)]
        made.append(figure(f"{name}: memory above its prediction", [max(0.0, *off)], 0.0))
        made.append(figure(f"{name}: memory below its prediction", [max(0.0, -max(off))], _MEMORY_TARGET))
    return made


def overrides_of(
    name: str, *, ranks: int, microbatches: int, steps: int, seconds: float, layers_per_rank: int = 4
) -> list[str]:
    """Model, data and loss.

    Args:
        name: ``sleeping`` or ``gpt``.
        ranks, microbatches, steps: as in :func:`measure`.
        seconds: that a rank's share of a forward sleeps.
        layers_per_rank: of stages that sleep.
    """
    samples = microbatches * (steps + _WARM_STEPS)
    if name == "gpt":
        sizes = GptSize().kwargs()
        shared = [f"data.kwargs.{key}={sizes[key]}" for key in ("sequence_length", "vocab_size")]
        made = ["model=gpt", "data=random_tokens", *(f"model.kwargs.{key}={value}" for key, value in sizes.items())]
        return [*made, *shared, f"data.kwargs.samples={4 * samples}", f"data.batch_size={4 * microbatches}"]
    module = __spec__.name if __spec__ is not None else __name__
    layers = layers_per_rank * ranks
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
    parser.add_argument("--all", action="store_true", help="twelve requests of both kinds, and their memory")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/prediction.json"))
    options = parser.parse_args()
    if options.all:
        _publish_all({name: run_and_read(words) for name, words in twelve(options.steps).items()}, options)
        return
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


def _publish_all(found: Mapping[str, Mapping[str, Any]], options: argparse.Namespace) -> None:
    seconds = {f"{name} predicted": [run["predicted"]] for name, run in found.items()}
    publish(
        "prediction",
        settings={"all": True, "steps": options.steps},
        seconds=seconds | {f"{name} measured": run["measured"] for name, run in found.items()},
        figures=all_figures(found),
        losses={name: run["losses"] for name, run in found.items()},
        path=options.out,
    )


if __name__ == "__main__":
    main()
