"""PipeFisher beside 1F1B with gradient descent, Adam and K-FAC: how busy two ranks are, and how the loss falls.

    python -m runner.recipes.benchmarks.pipefisher [--steps 200] [--microbatches 2]

Each is a `runner train` of the same GPT on the same batches, one after the other. K-FAC under 1F1B renews its inverses
as often as PipeFisher's bubbles allow, all at once. There are as many micro-batches as ranks, so that there is a bubble
worth filling: a third of the ranks' time. Predicted figures are those of each run's record, written before its first
step; that of the bubbles without K-FAC's work is the plan's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from runner.config.compose.resolve import resolve
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.recipes.benchmarks.result import publish
from runner.recipes.benchmarks.workload import GptSize

__all__ = ["SIZE", "Trained", "contestants", "main", "table", "train", "workload"]

SIZE = GptSize(layers=4, width=128, sequence_length=64, vocab_size=256, heads=4)
_FILLED = "pipefisher, kfac"
_SAMPLES = 8  # of a micro-batch
_KFAC = ("optimizer=kfac", "optimizer.momentum=0.9", "optimizer.lr=0.003", "optimizer.damping=1e-2")
_COLUMNS = (
    ("new inverses every", "{interval}"),
    ("busy, predicted", "{busy_predicted:.1%}"),
    ("busy, measured", "{busy_measured:.1%}"),
    ("without K-FAC's work", "{busy_without}"),
    ("step, predicted", "{step_predicted:.1f} ms"),
    ("step, measured", "{step_measured:.1f} ms"),
    ("compute and update of a step", "{working:.1%}"),
)


@dataclass(frozen=True)
class Trained:
    """One contestant's run.

    Args:
        record: what it wrote.
        plan: that its ranks made.
    """

    record: Mapping[str, Any]
    plan: RunPlan

    def figures(self, interval: str) -> dict[str, Any]:
        """What the columns print; of the mean step, as those of an interval are not alike."""
        record, fills = self.record, self.plan.schedule.filling is not None
        seconds = record["seconds"]
        return {
            "interval": interval,
            "busy_predicted": 1.0 - record["bubble_ratio"]["predicted"],
            "busy_measured": 1.0 - record["bubble_ratio"]["measured"],
            "busy_without": f"{self.plan.time.utilisation_without_fills:.1%}" if fills else "",
            "step_predicted": 1e3 * record["step_seconds"]["predicted"],
            "step_measured": 1e3 * fmean(record["step_seconds"]["all"]),
            "working": (seconds["compute"] + seconds["optimizer"]) / sum(seconds.values()),
        }


def workload(size: GptSize, *, microbatches: int, steps: int) -> list[str]:
    """Overrides that all share: the GPT in two stages, batches, length."""
    kwargs, batch = size.kwargs(), _SAMPLES * microbatches
    data = {"sequence_length": size.sequence_length, "vocab_size": size.vocab_size, "samples": batch * steps}
    return [
        *("model=gpt", "data=random_tokens", "data.shuffle=false", f"data.batch_size={batch}"),
        *(f"model.kwargs.{key}={value}" for key, value in kwargs.items()),
        *(f"data.kwargs.{key}={value}" for key, value in data.items()),
        *("parallelism=pipeline", "parallelism.pipeline=2", f"schedule.microbatches={microbatches}"),
        *("partition=profile", f"trainer.max_steps={steps}", "trainer.progress=false", "logger=none", "device=cpu"),
    ]


def contestants(interval: int) -> dict[str, tuple[str, ...]]:
    """Schedules and optimizers; the rates are the best of a few tried."""
    return {
        "1f1b, sgd": ("schedule=1f1b", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.3"),
        "1f1b, adamw": ("schedule=1f1b", "optimizer=adamw", "optimizer.lr=3e-3"),
        "1f1b, kfac": ("schedule=1f1b", *_KFAC, f"optimizer.refresh_every={interval}"),
        _FILLED: ("schedule=pipefisher", *_KFAC),
    }


def train(overrides: Sequence[str]) -> Trained:
    """Run `runner train`.

    Raises:
        CalledProcessError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "runner", "train", *overrides, f"run_dir={run_dir}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
        plan = make_plan(resolve(overrides), RunPlan.load(run_dir).profile)
    return Trained(record, plan)


def table(found: Mapping[str, Trained], interval: int) -> str:
    """Markdown: figures, and the loss over quarters of the run."""
    heads = [*(name for name, _ in _COLUMNS), *(f"loss, quarter {number}" for number in range(1, 5))]
    lines = [f"| | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for name, run in found.items():
        figures = run.figures(f"{interval} steps" if "kfac" in name else "")
        cells = [form.format(**figures) for _, form in _COLUMNS]
        losses = run.record["loss"]
        quarters = [losses[len(losses) * n // 4 : len(losses) * (n + 1) // 4] for n in range(4)]
        lines.append(f"| {name} | {' | '.join([*cells, *(f'{fmean(part):.3f}' for part in quarters)])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/pipefisher.json"))
    options = parser.parse_args()
    shared = workload(SIZE, microbatches=options.microbatches, steps=options.steps)
    filled = train([*shared, *contestants(1)[_FILLED]])  # first: its interval is that of K-FAC under 1F1B, too
    interval = filled.plan.schedule.windows
    if filled.record["bubble_ratio"]["measured"] is None:
        parser.error(f"--steps must be above {interval + 1}: the steps of the first interval are not timed")
    others = {name: own for name, own in contestants(interval).items() if name != _FILLED}
    found = {name: train([*shared, *own]) for name, own in others.items()} | {_FILLED: filled}
    publish(
        "pipefisher",
        settings={"model": SIZE.kwargs(), "ranks": 2, "microbatches": options.microbatches, "interval": interval},
        seconds={name: run.record["step_seconds"]["all"] for name, run in found.items()},
        figures=[],
        losses={name: run.record["loss"] for name, run in found.items()},
        path=options.out,
    )
    print(table(found, interval))


if __name__ == "__main__":
    main()
