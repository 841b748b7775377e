"""Seconds of a step with every compressor on a link that is slowed down, beside the predicted ones, and what they gain.

    python -m runner.recipes.compression.link outputs/compression/… outputs/compression_emoji/…

Each folder is a finished sweep: its records say the losses after each step, which do not depend on how busy the machine
is. Seconds do: run this on a machine that does nothing else. Compressors take turns in short runs of `runner train`, of
which the first steps do not count, and the layers are profiled anew. Printed are the load, the predicted and the median
measured step, and how much sooner than with plain sums each compressor reaches the loss that plain sums have after half
of the sweep's steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from runner.recipes.benchmarks.prediction import run_and_read
from runner.recipes.schedules.tables import markdown_table, replace_block

__all__ = ["Timed", "main", "rows_of", "running_mean", "verdicts"]

_LINK = 125_000_000  # bytes per second: 1 Gb/s
_WINDOW = 20  # steps of the running mean of losses
_WITHIN = 0.10  # of the measured step: where the predicted one should be
_HEADER = ("compression", "predicted", "measured", "off by", "of plain sums", "steps", "seconds", "sooner", "loss then")


@dataclass(frozen=True, slots=True)
class Timed:
    """The seconds of a compressor's step.

    Args:
        predicted: before each of its runs.
        measured: of every step that counts, of all its runs.
    """

    predicted: Sequence[float]
    measured: Sequence[float]


@dataclass(frozen=True, slots=True)
class Row:
    """A compressor's line of the table.

    Args:
        compression: its name.
        predicted, measured: medians of the seconds of a step.
        steps: until the running mean of its losses is at most that of plain sums after half of the steps; None: never.
        seconds: that these steps take.
        sooner: the part of plain sums' seconds that they save.
        loss_then: the running mean of its losses when plain sums have taken half of their steps, or at its last step.
    """

    compression: str
    predicted: float
    measured: float
    steps: int | None
    seconds: float | None
    sooner: float | None
    loss_then: float

    @property
    def off(self) -> float:
        """How far the predicted step is from the measured one, as a part of it."""
        return self.predicted / self.measured - 1


def running_mean(losses: Sequence[float]) -> list[float]:
    """Of each step and those before it, at most the last 20."""
    return [fmean(losses[max(0, at - _WINDOW + 1) : at + 1]) for at in range(len(losses))]


def rows_of(losses: Mapping[str, Sequence[float]], timed: Mapping[str, Timed]) -> list[Row]:
    """A line for each compressor that was timed.

    Args:
        losses: of each compressor's steps; ``none`` is among them.
        timed: of each compressor; ``none`` is among them.
    """
    half = len(losses["none"]) // 2
    target = running_mean(losses["none"])[half - 1]
    plain_seconds = half * median(timed["none"].measured)
    rows = []
    for name, each in timed.items():
        means, step = running_mean(losses[name]), median(each.measured)
        steps = next((at + 1 for at in range(_WINDOW - 1, len(means)) if means[at] <= target), None)
        seconds = None if steps is None else steps * step
        sooner = None if seconds is None else 1 - seconds / plain_seconds
        then = means[min(len(means), max(1, int(plain_seconds / step))) - 1]
        rows.append(Row(name, median(each.predicted), step, steps, seconds, sooner, then))
    return rows


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Which compressor is the soonest at plain sums' loss, by how much, and how many predictions are near enough."""
    plain = next(row for row in rows if row.compression == "none")
    reached = [row for row in rows if row is not plain and row.seconds is not None]
    near = sum(abs(row.off) <= _WITHIN for row in rows)
    told = [f"{near} of {len(rows)} predicted steps are within {_WITHIN:.0%} of the measured ones."]
    if not reached:
        return [*told, "No compressor reaches the loss of plain sums."]
    best = min(reached, key=lambda row: row.seconds or 0.0)
    assert best.seconds is not None
    assert plain.seconds is not None
    change = 1 - best.seconds / plain.seconds
    took = (
        f"{best.seconds:.1f} s instead of {plain.seconds:.1f} s, {abs(change):.0%} {'less' if change > 0 else 'more'}"
    )
    goal = f"the loss that plain sums have after {plain.steps} steps"
    return [*told, f"The soonest at {goal} is {best.compression}: {took}."]


def _sweep(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a sweep that ended well, by compressor.

    Raises:
        ValueError: it is no such folder, or the job without compression is missing.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder. Try runner train -m recipe=compression run_dir={folder}")
    jobs = sorted((each for each in folder.iterdir() if each.name.isdigit()), key=lambda each: int(each.name))
    records = [json.loads((job / "record.json").read_text(encoding="utf-8")) for job in jobs]
    found = {each["config"]["compression"]["name"]: each for each in records if each["status"] == "ok"}
    if "none" not in found:
        raise ValueError(f"{folder}: no job with compression=none has ended well, with which others could be compared")
    return found


def _take_turns(recipe: str, names: Sequence[str], rounds: int, steps: int) -> dict[str, Timed]:
    """Run every compressor once in each round; the first run profiles the layers for all."""
    predicted: dict[str, list[float]] = defaultdict(list)
    measured: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        for name in names:
            words = [f"recipe={recipe}", f"compression={name}", f"transport.bytes_per_second={_LINK}"]
            words += [f"trainer.max_steps={steps + 2}", "trainer.val_every=null", "checkpoint=none"]
            found = run_and_read(words)
            predicted[name].append(found["predicted"])
            measured[name] += found["measured"]
            load = os.getloadavg()[0]
            print(
                f"{recipe} {number + 1}/{rounds} {name}: {median(found['measured']):.4f} s, load {load:.1f}", flush=True
            )
    return {name: Timed(predicted[name], measured[name]) for name in names}


def _markdown(recipe: str, rows: Sequence[Row], told: Sequence[str]) -> str:
    plain = next(row for row in rows if row.compression == "none")
    return "\n\n".join([f"`recipe={recipe}`:", markdown_table(_HEADER, [_cells(row, plain) for row in rows]), *told])


def _cells(row: Row, plain: Row) -> list[str]:
    cells = [row.compression, f"{row.predicted:.4f}", f"{row.measured:.4f}", f"{row.off:+.1%}"]
    cells += [f"{row.measured / plain.measured:.2f}", "-" if row.steps is None else str(row.steps)]
    cells += ["-" if row.seconds is None else f"{row.seconds:.1f}", "-" if row.sooner is None else f"{row.sooner:.0%}"]
    return [*cells, f"{row.loss_then:.4f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", type=Path, help="folders of finished sweeps")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="of a run, that count")
    parser.add_argument("--out", type=Path, default=Path("outputs/compression/link.json"))
    parser.add_argument("--write-readme", action="store_true", help="put the tables into the recipe's README")
    asked = parser.parse_args(arguments)
    try:
        sweeps = [_sweep(folder) for folder in asked.sweeps]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    load, parts, found = os.getloadavg(), [], {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["RUNNER_CACHE"] = cache  # a profile that was measured on a busy machine predicts too long a step
        for records in sweeps:
            recipe = records["none"]["config"]["name"]
            timed = _take_turns(recipe, list(records), asked.rounds, asked.steps)
            rows = rows_of({name: record["loss"] for name, record in records.items()}, timed)
            parts.append(_markdown(recipe, rows, verdicts(rows)))
            found[recipe] = {
                "timed": {name: asdict(each) for name, each in timed.items()},
                "rows": [*map(asdict, rows)],
            }
    after = os.getloadavg()
    told = {"date": datetime.now(UTC).date().isoformat(), "machine": platform.platform(), "load": [*load, *after]}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps({**told, "link": _LINK, "recipes": found}, indent=1) + "\n", encoding="utf-8")
    parts.append(f"Load over a minute before and after: {load[0]:.1f}, {after[0]:.1f}. Measured on {told['date']}.")
    content = "\n\n".join(parts)
    print(content)
    if asked.write_readme:
        replace_block(Path(__file__).parent / "README.md", "link", content)


if __name__ == "__main__":
    main()
