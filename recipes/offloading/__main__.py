"""Tables of offload strategies under one budget and links of several speeds, in one command.

python -m runner.recipes.offloading [--models GPT U-Net …] [--share S] [--links …] [--steps N] [--write-readme]
    [--out FILE] [--read FILE …]
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

from runner.recipes.offloading.measure import measure
from runner.recipes.offloading.tables import markdown
from runner.recipes.rematerialization.models import MODELS
from runner.recipes.schedules.tables import replace_block

__all__ = ["document", "main"]

_LINKS = (0.5e9, 1e9, 4e9, 16e9)


def document(names: Sequence[str], share: float, links: Sequence[float], steps: int) -> dict[str, Any]:
    """Everything that the tables show; see :func:`runner.recipes.offloading.measure.measure`."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        print(f"{name} ...", flush=True)
        found[name] = measure(MODELS[name](), share=share, links=links, steps=steps)
    told = {"machine": f"{platform.machine()} CPU, one thread", "torch": torch.__version__}
    return {**told, "date": datetime.now(UTC).date().isoformat(), "models": found}


def _read(files: Sequence[Path]) -> dict[str, Any]:
    """What several calls have written of different models, as one document."""
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    models = {name: found for each in documents for name, found in each["models"].items()}
    return {**documents[-1], "models": models}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the tables or write them."""
    parser = argparse.ArgumentParser(prog="python -m runner.recipes.offloading")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--share", type=float, default=0.4, help="the budget, as a part of the plain peak")
    parser.add_argument("--links", nargs="+", type=float, default=list(_LINKS), help="bytes per second")
    parser.add_argument("--steps", type=int, default=0, help="steps that are timed; 0: bytes alone are measured")
    parser.add_argument("--read", nargs="+", type=Path, help="measure nothing: take what --out has written")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    parser.add_argument("--write-readme", action="store_true", help="put the tables into the recipe's README")
    asked = parser.parse_args(arguments)
    made = _read(asked.read) if asked.read else document(asked.models, asked.share, asked.links, asked.steps)
    if asked.out is not None:
        asked.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if asked.write_readme:
        replace_block(Path(__file__).parent / "README.md", "measured", markdown(made))
    else:
        print(markdown(made))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
