"""Tables and figures of activation-checkpoint strategies, in one command.

python -m runner.recipes.rematerialization [--write-readme] [--models GPT U-Net …] [--strategies rotor …]
    [--budgets N] [--out FILE] [--read FILE …] [--seconds]
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from runner.recipes.rematerialization.figures import draw
from runner.recipes.rematerialization.measure import BUDGETED, BUDGETS, measure
from runner.recipes.rematerialization.models import MODELS
from runner.recipes.rematerialization.tables import markdown
from runner.recipes.schedules.tables import replace_block

__all__ = ["document", "main"]

_HERE = Path(__file__).parent


def document(
    names: Sequence[str],
    budgets: int = BUDGETS,
    budgeted: Sequence[str] = tuple(BUDGETED),
    *,
    timed: bool = False,
) -> dict[str, Any]:
    """Everything that the tables show, for the models of these names; for the rest see :func:`.measure.measure`."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        print(f"{name} ...", flush=True)
        found[name] = measure(MODELS[name](), budgets=budgets, budgeted=budgeted, timed=timed)
    told = {"machine": f"{platform.machine()} CPU, one thread", "torch": torch.__version__}
    return {**told, "date": datetime.now(UTC).date().isoformat(), "models": found}


def _read(files: Sequence[Path]) -> dict[str, Any]:
    """What several calls have written, as one; of a model that is in several files, strategies of all."""
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    models: dict[str, Any] = {}
    for each in documents:
        for name, found in each["models"].items():
            known = models.setdefault(name, found)
            known["budgets"] |= found["budgets"]
            known["refused"] |= found["refused"]
    return {**documents[-1], "models": models}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the tables or write them with the figures."""
    parser = argparse.ArgumentParser(prog="python -m runner.recipes.rematerialization")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--budgets", type=int, default=BUDGETS, help="equal parts of the plain peak")
    parser.add_argument("--strategies", nargs="*", choices=list(BUDGETED), default=list(BUDGETED), help="under budgets")
    parser.add_argument("--seconds", action="store_true", help="time steps, too, on a machine that does nothing else")
    parser.add_argument("--read", nargs="+", type=Path, help="measure nothing: take what --out has written")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    parser.add_argument("--write-readme", action="store_true", help="put tables and figures into the recipe's folder")
    asked = parser.parse_args(arguments)
    made = (
        _read(asked.read)
        if asked.read
        else document(asked.models, asked.budgets, asked.strategies, timed=asked.seconds)
    )
    if asked.out is not None:
        asked.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if asked.write_readme:
        draw(made, _HERE / "figures")
        replace_block(_HERE / "README.md", "measured", markdown(made))
    else:
        print(markdown(made))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
