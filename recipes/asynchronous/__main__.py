"""Measures loss against delay and the asynchronous schedules, and writes results, figure and the README's tables."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from runner.recipes.asynchronous import claim, delay, figures, schedules

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
_CLAIM_HEADER = [
    "schedule", "validation loss of each seed", "mean and standard deviation", "against 1F1B", "steps late, by stage",
    "steady utilisation", "bytes of weights over those of 1F1B",
]  # fmt: skip
_CURVES = "![training loss by samples](loss_by_samples.svg)"
_HEADER = [
    "schedule", "steps", "training loss", "validation loss", "against 1F1B", "time over 1F1B's, predicted",
    "1F1B's training loss after that time", "copies of weights",
    "steps late, by stage", "weights between steps, predicted", "counted", "peak, predicted", "counted",
]  # fmt: skip


def main() -> None:
    """Run what is asked for, and keep the other part of the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=(*_KINDS, "readme"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=8, help="walks per step, for delay")
    parser.add_argument("--more", action="store_true", help="keep the runs that are there already, and make the others")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if given.what != "readme":
        known = kept.get(given.what, {}).get("runs", []) if given.more else []
        sizes = {"steps": given.steps, "samples": given.samples} if given.what == "delay" else {"steps": given.steps}
        kept[given.what] = {**sizes, "runs": []}
        for made in _KINDS[given.what](given, known):
            print({key: value for key, value in made.items() if key != "curve"}, flush=True)
            kept[given.what]["runs"].append(made)
            RESULTS.write_text(_as_text(kept), encoding="utf-8")  # it may be stopped here, and go on with --more
    _write_readme(kept)


def _as_text(results: dict[str, Any]) -> str:
    """JSON with a line for each run."""
    parts = []
    for name, part in results.items():
        runs = ",\n".join(json.dumps(each) for each in part["runs"])
        figures = "".join(f"{json.dumps(key)}: {json.dumps(value)}, " for key, value in part.items() if key != "runs")
        parts.append(f'{json.dumps(name)}: {{{figures}"runs": [\n{runs}\n]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _delays(given: argparse.Namespace, known: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The last loss of every optimizer, depth and rate; what is known is not run again."""
    there = {(each["optimizer"], each["depth"], each["rate"]): each for each in known}
    for name, (_, rates) in delay.OPTIMIZERS.items():
        for depth, rate in itertools.product(delay.DEPTHS, rates):
            made = there.get((name, depth, rate))
            yield made or delay.train(name, depth, rate, steps=given.steps, samples=given.samples).as_json()


def _schedules(given: argparse.Namespace, known: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every request's result; what is known is not run again."""
    there = {each["label"]: each for each in known}
    with tempfile.TemporaryDirectory() as folder:
        for label in schedules.REQUESTS:
            yield there.get(label) or asdict(schedules.run(label, given.steps, Path(folder)))


def _claim(given: argparse.Namespace, known: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every variant and seed of PipeMare's claim; what is known is not run again."""
    there = {(each["label"], each["seed"]): each for each in known}
    with tempfile.TemporaryDirectory() as folder:
        for label, seed in itertools.product(claim.VARIANTS, claim.SEEDS):
            made = there.get((label, seed))
            yield made or asdict(claim.run(label, seed, given.steps, Path(folder)))


_KINDS: dict[str, Callable[[argparse.Namespace, Sequence[dict[str, Any]]], Iterator[dict[str, Any]]]] = {
    "delay": _delays,
    "schedules": _schedules,
    "pipemare": _claim,
}


def _write_readme(results: dict[str, dict[str, Any]]) -> None:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if "delay" in results:
        runs = results["delay"]["runs"]
        made_for = {each["optimizer"] for each in runs}
        best = {
            name: [_best(runs, name, depth) for depth in delay.DEPTHS] for name in delay.OPTIMIZERS if name in made_for
        }
        header = ["optimizer", *(f"D = {depth}" for depth in delay.DEPTHS)]
        lines = [[name, *itertools.starmap(_cell, row)] for name, row in best.items()]
        text = _between(text, "delay", f"{results['delay']['steps']} steps.\n\n{_table(header, lines)}")
        figures.draw_delays(best, HERE / "loss_against_delay.svg")
    made = [schedules.Result(**each) for each in results.get("schedules", {}).get("runs", [])]
    if made:
        steps = f"{results['schedules']['steps']} steps of `1f1b`."
        text = _between(text, "schedules", f"{steps}\n\n{_table(_HEADER, schedules.rows(made))}")
        rates = [f"rate {rate:g}" for rate in schedules.RATES]
        table = _table(["validation loss", *rates], schedules.momentum_rows(made))
        text = _between(text, "momentum", f"{table}\n\n{_CURVES}")
        figures.draw_curves(made, HERE / "loss_by_samples.svg")
    if "pipemare" in results:
        outcomes = [claim.Outcome(**each) for each in results["pipemare"]["runs"]]
        table = _table(_CLAIM_HEADER, claim.rows(outcomes))
        text = _between(text, "pipemare", f"{results['pipemare']['steps']} steps.\n\n{table}")
    (HERE / "README.md").write_text(text, encoding="utf-8")


def _best(runs: Iterable[dict[str, Any]], name: str, depth: int) -> tuple[float, float]:
    """The lowest loss of an optimizer at a depth, and its learning rate."""
    found = [each for each in runs if (each["optimizer"], each["depth"]) == (name, depth) and each["loss"] is not None]
    losses = [(float(str(each["loss"])), float(str(each["rate"]))) for each in found]
    return min(losses, default=(math.inf, math.nan))


def _cell(loss: float, rate: float) -> str:
    return f"{loss:.3f} ({rate:g})" if math.isfinite(loss) else "diverged"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _between(text: str, name: str, content: str) -> str:
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = text.split(first)
    return f"{before}{first}\n\n{content}\n\n{last}{rest.split(last)[1]}"


if __name__ == "__main__":
    main()
