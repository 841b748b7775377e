"""Measures loss against delay and the asynchronous schedules, and writes results, figure and the README's tables."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib
import torch

from runner.recipes.asynchronous import delay, schedules
from runner.recipes.asynchronous.model import entropy

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
_PICTURE = "![loss against the number of stages](loss_against_delay.svg)"


def main() -> None:
    """Run what is asked for, and keep the other part of the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("delay", "schedules", "readme"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=8, help="walks per step, for delay")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if given.what == "delay":
        kept["delay"] = {"steps": given.steps, "samples": given.samples, "runs": _delays(given.steps, given.samples)}
    if given.what == "schedules":
        kept["schedules"] = {"steps": given.steps, "runs": _schedules(given.steps)}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    _write_readme(kept)


def _delays(steps: int, samples: int) -> list[dict[str, object]]:
    found = []
    for name, (_, rates) in delay.OPTIMIZERS.items():
        for depth in delay.DEPTHS:
            for rate in rates:
                outcome = delay.train(name, depth, rate, steps=steps, samples=samples)
                print(f"{name}, depth {depth}, rate {rate:g}: {outcome.loss:.4f}", flush=True)
                made = asdict(outcome) | {"loss": outcome.loss if math.isfinite(outcome.loss) else None}
                found.append({key: value for key, value in made.items() if key != "curve"})
    return found


def _schedules(steps: int) -> list[dict[str, object]]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in schedules.REQUESTS:
            result = schedules.run(name, steps, Path(folder), rate=0.003 if not schedules.REQUESTS[name].more else 0.03)
            print(asdict(result), flush=True)
            found.append(asdict(result))
    return found


def _write_readme(results: dict[str, dict[str, object]]) -> None:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if "delay" in results:
        runs: list[dict[str, object]] = results["delay"]["runs"]  # type: ignore[assignment]
        best = {name: [_best(runs, name, depth) for depth in delay.DEPTHS] for name in delay.OPTIMIZERS}
        header = ["optimizer", *(f"D = {depth}" for depth in delay.DEPTHS)]
        lines = [[name, *(_cell(loss, rate) for loss, rate in row)] for name, row in best.items()]
        text = _between(text, "delay", f"{_table(header, lines)}\n\n{_PICTURE}")
        _draw(best)
    if "schedules" in results:
        made = [schedules.Result(**each) for each in results["schedules"]["runs"]]  # type: ignore[attr-defined]
        header = [
            "schedule",
            "optimizer",
            "steps",
            "training loss",
            "validation loss",
            "against 1F1B",
            "copies of weights",
        ]
        text = _between(text, "schedules", _table(header, schedules.rows(made)))
    (HERE / "README.md").write_text(text, encoding="utf-8")


def _best(runs: Iterable[dict[str, object]], name: str, depth: int) -> tuple[float, float]:
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


def _draw(best: dict[str, list[tuple[float, float]]]) -> None:
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "asynchronous"  # the same bytes for the same figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    for name, row in best.items():
        axes.plot(delay.DEPTHS, [loss for loss, _ in row], marker="o", label=name)
    axes.axhline(entropy(), color="grey", linewidth=0.8, linestyle="--", label="least possible loss")
    axes.set_xscale("log", base=2)
    axes.set_xticks(delay.DEPTHS, [str(depth) for depth in delay.DEPTHS])
    axes.set_xlabel("stages D; the first stage is D - 1 steps late")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(HERE / "loss_against_delay.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
