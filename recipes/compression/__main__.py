"""Puts the tables and figures of finished sweeps into the README.

python -m runner.recipes.compression outputs/compression/… outputs/compression_emoji/… outputs/approximations/…

The approximations' own page is in recipes/approximations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.recipes.approximations import factorial
from runner.recipes.compression import table

__all__ = ["main", "write"]

_RECIPES = Path(__file__).resolve().parents[1]
_REPORTS = {
    "compression": ("compression", table.sweep_report),
    "compression_emoji": ("compression", table.sweep_report),
    "approximations": ("approximations", factorial.sweep_report),
}
"""By a recipe's name, the folder of its page and what makes its tables."""


def main(folders: Sequence[str]) -> None:
    """Read each sweep's records; the recipe's name in them tells which block they fill."""
    for folder in folders:
        jobs = sorted((each for each in Path(folder).iterdir() if each.name.isdigit()), key=lambda each: int(each.name))
        runs = [{"directory": str(job), "record": json.loads((job / "record.json").read_text("utf-8"))} for job in jobs]
        name = runs[0]["record"]["config"]["name"]
        page, report = _REPORTS[name]
        write(_RECIPES / page, name, report(runs))


def write(folder: Path, name: str, report: Mapping[str, Any]) -> None:
    """Put a report's tables between the marks of its name in ``folder/README.md``, and its figures beside it."""
    parts = []
    for made in report["tables"]:
        lines = [made["header"], ["---"] * len(made["header"]), *made["rows"]]
        parts += ["\n".join("| " + " | ".join(line) + " |" for line in lines), *made["notes"]]
    for file, draw in report["figures"].items():
        draw(folder / file)
        parts.append(f"![{name}: losses]({file})")
    path, first, last = folder / "README.md", f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = path.read_text("utf-8").split(first)
    content = "\n\n".join(parts)
    path.write_text(f"{before}{first}\n\n{content}\n\n{last}{rest.split(last)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
