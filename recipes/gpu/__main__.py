"""Measure everything on one GPU, within eight minutes.

    python -m runner.recipes.gpu [--out FOLDER] [--parts NAME ...]

Each run is a command of its own. What does not run is a row with its reason; what does not begin before the time is up
is a row that says so. ``tables.md``, ``tables.json`` and ``memory.svg`` are written into the folder after every part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.compose.resolve import resolve
from runner.recipes.benchmarks.reserved import predict_reserved
from runner.recipes.gpu.runs import PARTS, malevich, plain_words
from runner.recipes.gpu.tables import Row, memory_figure, row_of, tables

__all__ = ["Session", "main", "most_layers"]

_SECONDS = 7.5 * 60
_MALEVICH_LAYERS = (24, 20, 16, 12, 8, 4)


class Session:
    """Runs commands until the time is up.

    Args:
        folder: of the runs and the results.
        device: of every run.
        seconds: after which no further run begins.
    """

    def __init__(self, folder: Path, device: str, seconds: float = _SECONDS) -> None:
        self.folder, self.device = folder, device
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the time is up."""
        return max(0.0, self._end - time.monotonic())

    def train(self, part: str, name: str, words: Sequence[str]) -> Row:
        """Train, and return what the record says."""
        if not self.left:
            return Row(name, status="left out", reason="the time was up")
        run_dir = self.folder / part / name.replace(" ", "_").replace(",", "")
        line = ["runner", "train", *words, f"device={self.device}", f"run_dir={run_dir}"]
        print(" ".join(line), file=sys.stderr, flush=True)
        try:
            done = self._run([sys.executable, "-m", *line])
        except subprocess.TimeoutExpired:
            return Row(name, status="cut", reason="the time was up")
        told = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        row = row_of(name, run_dir, reason=told[-1])
        return replace(row, predicted_reserved=predict_reserved(resolve(line[2:]))) if row.status == "ok" else row

    def plan(self, words: Sequence[str]) -> Mapping[str, Any] | None:
        """The plan of a request as JSON; None if there is none."""
        done = self._run([sys.executable, "-m", "runner", "plan", *words, f"device={self.device}", "--json"])
        try:
            found: Mapping[str, Any] = json.loads(done.stdout)
        except ValueError:
            return None
        return found

    def plain(self) -> Row:
        """The hand-written loop."""
        done = self._run([sys.executable, "-m", "runner.recipes.gpu.plain", *plain_words()])
        if done.returncode:
            return Row("hand-written loop", status="failed", reason=(done.stderr.strip().splitlines() or [""])[-1])
        found = json.loads(done.stdout)
        return Row("hand-written loop", seconds=found["seconds"], loss=found["loss"])

    def _run(self, line: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=self.left + 30)


def most_layers(session: Session) -> int | None:
    """The most layers of Malevich that the plan says fit; None if none do."""
    for layers in _MALEVICH_LAYERS:
        plan = session.plan(malevich(layers))
        if plan is not None and plan.get("fits"):
            return layers
    return None


def measure(session: Session, part: str) -> list[Row]:
    """All rows of a part."""
    runs = dict(PARTS[part].runs)
    if part == "malevich":
        layers = most_layers(session)
        if layers is None:
            return [Row("Malevich", status="failed", reason="no number of layers fits")]
        runs = {f"{layers} of 24 layers": malevich(layers)}
    first = [session.plain()] if part == "precision" else []
    return [*first, *(session.train(part, name, words) for name, words in runs.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("torch sees no GPU here, `runner doctor` says why", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    session, found = Session(options.out, "cuda"), {}
    for part in options.parts:
        found[part] = measure(session, part)
        (options.out / "tables.md").write_text(tables(found, torch.cuda.get_device_name(0)), encoding="utf-8")
        rows = {name: [row.to_json() for row in rows] for name, rows in found.items()}
        (options.out / "tables.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        memory_figure(found, options.out / "memory.svg")
    print((options.out / "tables.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
