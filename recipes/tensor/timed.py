"""Times layouts of a Llama whose maps sleep: what is predicted beside what is measured, and what ``auto`` takes.

    python -m runner.recipes.tensor.timed [--out FOLDER] [--rounds N] [--write-readme]

Eight ranks of two stages, two replicas and two parts; and every layout of four ranks, each as fast as the planner makes
it, beside the one that ``parallelism=auto`` takes of them. These are run in turns. Sleeping takes no core, so the
commands are told that there are as many as ranks. Plans and runs that are already in the folder are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from runner.recipes.schedules.tables import replace_block
from runner.record import RunRecord

__all__ = ["GRID", "SLEEPING", "found", "layouts", "main", "markdown", "six", "timed"]

_SIZES = {
    "seconds": 0.02, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": 64, "max_position_embeddings": 16,
}  # fmt: skip
_DATA = {"samples": 128, "length": 16, "vocabulary": 64}
SLEEPING = (
    "model=custom", "model.target=runner.recipes.tensor.asleep:llama",
    *(f"+model.kwargs.{key}={value}" for key, value in _SIZES.items()),
    "data=custom", "data.target=runner.recipes.tensor.asleep:tokens",
    *(f"+data.kwargs.{key}={value}" for key, value in _DATA.items()),
    "loss=token_cross_entropy", "device=cpu", "logger=none", "trainer.progress=false", "checkpoint=none",
    "hardware.link_bytes_per_second=1e9", "hardware.link_latency_seconds=2e-4", "trainer.max_steps=7",
)  # fmt: skip
"""The words of a short run of the model whose maps sleep."""

_DEGREES = ("pipeline", "data", "tensor")
GRID = {
    "2 x 2 x 2": ("schedule=1f1b", "parallelism.sequence=false"),
    "2 x 2 x 2, sequence": ("schedule=1f1b", "parallelism.sequence=true"),
}
"""Further words of layouts of eight ranks, by name."""

_RANKS = 4
_COMMAND = "import os, sys; os.sched_getaffinity = lambda pid: set(range({cores})); from runner.cli.main import main; "
_COMMAND += "sys.exit(main(sys.argv[1:]))"


def layouts(ranks: int) -> Iterator[tuple[int, int, int]]:
    """Every ``(pipeline, data, tensor)`` of so many ranks."""
    for pipeline in range(1, ranks + 1):
        for data in range(1, ranks // pipeline + 1):
            if ranks % (pipeline * data) == 0:
                yield pipeline, data, ranks // (pipeline * data)


def _runner(cores: int, *words: str) -> str:
    """Run ``runner`` where it is told of so many cores, and return what it printed.

    Raises:
        RuntimeError: the command failed; the message is what it said.
    """
    command = [sys.executable, "-c", _COMMAND.format(cores=cores), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stderr}")
    return done.stdout


def timed(folder: Path, ranks: int, words: Sequence[str]) -> dict[str, Any]:
    """The predicted and the measured seconds of a step of a run, and the load of the machine when it ended."""
    kept = folder / "timed.json"
    if not kept.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _runner(ranks, "train", *words, f"run_dir={folder}")
        step = RunRecord.load(folder).step_seconds
        made = {"predicted": step["predicted"], "measured": step["median"], "load": os.getloadavg()[0]}
        kept.write_text(json.dumps(made), encoding="utf-8")
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def found(folder: Path, degrees: Mapping[str, int]) -> dict[str, Any]:
    """What the planner finds for four ranks: the words of the request, its layout, and the seconds of a step.

    Args:
        folder: where the answer is kept.
        degrees: those that are given, by name.
    """
    kept = folder / ("-".join(f"{key}{value}" for key, value in degrees.items()) or "auto") / "plan.json"
    if not kept.exists():
        named = [f"parallelism.{key}={value}" for key, value in degrees.items()]
        asked = ("parallelism=auto", f"parallelism.ranks={_RANKS}", "parallelism.search=quick", "data.batch_size=16")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(_runner(_RANKS, "plan", *SLEEPING, *asked, *named, "--json"), encoding="utf-8")
    plan = json.loads(kept.read_text(encoding="utf-8"))
    layout = tuple(plan["layout"][each] for each in _DEGREES)
    return {"request": plan["request"], "layout": layout, "seconds": plan["step_seconds"]}


def six(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each layout of four ranks: what is planned, and what is measured in so many runs in turns."""
    chosen = found(folder, {})
    plans = [found(folder, dict(zip(_DEGREES, each, strict=True))) for each in layouts(_RANKS)]
    rows: list[dict[str, Any]] = [
        {**plan, "is_chosen": plan["layout"] == chosen["layout"], "auto": chosen["seconds"], "measured": [], "load": []}
        for plan in plans
    ]
    for turn in range(rounds):
        for row in rows:
            name = "x".join(map(str, row["layout"]))
            request = chosen["request"] if row["is_chosen"] else row["request"]
            made = timed(folder / f"{name}-{turn}", _RANKS, request)
            row["measured"].append(made["measured"])
            row["load"].append(made["load"])
    return rows


def markdown(grid: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """The two tables."""
    lines = ["| pipeline x data x tensor | predicted | measured | predicted is off by | load |", f"|{' --- |' * 5}"]
    for row in grid:
        off = row["predicted"] / row["measured"] - 1
        times = f"{row['predicted']:.3f} s | {row['measured']:.3f} s"
        lines.append(f"| {row['name']} | {times} | {off:+.1%} | {row['load']:.1f} |")
    best = min(median(row["measured"]) for row in rows)
    lines += ["", "| pipeline x data x tensor | planned | measured | over the best | load |", f"|{' --- |' * 5}"]
    for row in rows:
        name = " x ".join(map(str, row["layout"])) + (", which `auto` takes" if row["is_chosen"] else "")
        step = median(row["measured"])
        load = f"{min(row['load']):.1f} to {max(row['load']):.1f}"
        lines.append(f"| {name} | {row['seconds']:.3f} s | {step:.3f} s | {step / best - 1:.1%} | {load} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/tensor/timed"))
    parser.add_argument("--rounds", type=int, default=2, help="runs of each layout of four ranks, in turns")
    parser.add_argument("--write-readme", action="store_true", help="put the tables into the README")
    asked = parser.parse_args(arguments)
    eight = [f"parallelism.{each}=2" for each in _DEGREES]
    words = (*SLEEPING, *eight, "schedule.microbatches=4", "data.batch_size=32")
    grid = [
        {"name": name, **timed(asked.out / f"grid-{number}", 2 ** len(_DEGREES), (*words, *more))}
        for number, (name, more) in enumerate(GRID.items())
    ]
    rows = six(asked.out, asked.rounds)
    made = markdown(grid, rows)
    (asked.out / "results.json").write_text(json.dumps({"grid": grid, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(made)
    if asked.write_readme:
        replace_block(Path(__file__).parent / "README.md", "timed", made)


if __name__ == "__main__":
    main()
