"""Tables and figures of the synchronous schedules, in one command.

python -m runner.recipes.schedules [--write-readme]
python -m runner.recipes.schedules --reuse           (tables and figures from the last measurements)
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.environment import environment
from runner.recipes.schedules import measured, memory
from runner.recipes.schedules.computed import compute
from runner.recipes.schedules.figures import draw
from runner.recipes.schedules.rows import ROWS, Row
from runner.recipes.schedules.tables import markdown, replace_block, to_csv

__all__ = ["document", "main"]

_HERE = Path(__file__).parent
_MEMORY_RANKS = 4


def document(
    *, ranks: Sequence[int], microbatches: int, seconds: float, rounds: int, measures: bool = True
) -> dict[str, Any]:
    """Everything that the tables show.

    Args:
        ranks: of each table of bubbles.
        seconds: that a rank's share of a forward sleeps.
        rounds: turns of each schedule.
        measures: whether processes run; otherwise only what can be computed is there.
    """
    settings = {
        "microbatches": microbatches,
        "seconds": seconds,
        "rounds": rounds,
        "steps_in_a_row": measured.STEPS_IN_A_ROW,
        "memory_ranks": _MEMORY_RANKS,
        "blocks": memory.BLOCKS,
    }
    held, bubbles, load = {}, {}, os.getloadavg()[0]
    if measures:
        print(f"memory, D = {_MEMORY_RANKS} ...", flush=True)
        held = memory.measure(_MEMORY_RANKS, microbatches)
    for number in ranks:
        taken = {}
        if measures:
            print(f"bubbles, D = {number} ...", flush=True)
            taken = measured.measure(number, microbatches=microbatches, seconds=seconds, rounds=rounds)
        bubbles[str(number)] = [_bubble_row(row, number, settings, taken.get(row.label, {})) for row in ROWS]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment(),
        "load_before": load,
        "settings": settings,
        "rows": _described(),
        "bubbles": bubbles,
        "memory": [_memory_row(row, microbatches, held.get(row.label)) for row in ROWS],
    }


def _described() -> list[dict[str, Any]]:
    return [asdict(row) | {"label": row.label} for row in ROWS]


def _bubble_row(
    row: Row, ranks: int, settings: Mapping[str, Any], seconds_of_step: Mapping[str, float]
) -> dict[str, Any]:
    known = compute(row, ranks, settings["microbatches"])
    found: dict[str, Any] = {
        "label": row.label,
        "printed_bubble": row.printed[0] if row.printed else "",
        "printed_activations": row.printed[1] if row.printed else "",
        "formula": known.formula,
        "simulated": known.simulated,
        "simulated_in_a_row": known.simulated_in_a_row,
        "seconds_of_step": dict(seconds_of_step),
    }
    for kind, key in (("flushed", "measured"), ("in_a_row", "measured_in_a_row")):
        if kind in seconds_of_step:
            found[key] = measured.bubble(known.busy, settings["seconds"], seconds_of_step[kind])
    return found


def _memory_row(row: Row, microbatches: int, held: list[dict[str, int]] | None) -> dict[str, Any]:
    known = compute(row, _MEMORY_RANKS, microbatches)
    found = {
        "label": row.label,
        "printed_activations": row.printed[1] if row.printed else "",
        "ticks": row.ticks,
        "undecided": row.undecided,
        "formula_activations": known.formula_activations,
        "simulated_activations": known.simulated_activations,
        **memory.predict(row, _MEMORY_RANKS, microbatches),
    }
    return found if held is None else found | {"measured": held}


def write(content: Mapping[str, Any], folder: Path) -> None:
    """Tables as Markdown, CSV and JSON, and the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedules.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "schedules.csv").write_text(to_csv(content), encoding="utf-8")
    (folder / "schedules.md").write_text(markdown(content) + "\n", encoding="utf-8")
    draw(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a rank's share of a forward")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each schedule that count")
    parser.add_argument("--reuse", action="store_true", help="measure nothing, take what is in --out")
    parser.add_argument("--out", type=Path, default=Path("outputs/schedules"))
    parser.add_argument("--write-readme", action="store_true", help="put tables and figures into this recipe's folder")
    options = parser.parse_args()
    if options.reuse:
        content = json.loads((options.out / "schedules.json").read_text(encoding="utf-8")) | {"rows": _described()}
    else:
        content = document(
            ranks=options.ranks,
            microbatches=options.microbatches,
            seconds=options.milliseconds / 1000,
            rounds=options.rounds,
        )
    write(content, options.out)
    print(markdown(content))
    print(f"\nwritten to {options.out}")
    if options.write_readme:
        replace_block(_HERE / "README.md", "tables", markdown(content))
        draw(_HERE / "figures")


if __name__ == "__main__":
    main()
