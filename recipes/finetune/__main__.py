"""Fine-tuning of images and of text, measured: the recipe's tables and picture.

python -m runner.recipes.finetune images|text [--write-readme] [--out FOLDER] [WORD ...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from runner.recipes.finetune import drawings, figures, images, text
from runner.recipes.schedules.tables import replace_block

__all__ = ["main"]

_HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one part, and print its tables or write them with the picture."""
    parser = argparse.ArgumentParser(prog="python -m runner.recipes.finetune")
    parser.add_argument("part", choices=_PARTS)
    parser.add_argument("words", nargs="*", help="overrides of every run, such as trainer.max_steps=10")
    parser.add_argument("--out", type=Path, default=Path("outputs/finetune"), help="the folder of the runs")
    parser.add_argument("--write-readme", action="store_true", help="put tables and picture into the recipe's folder")
    asked = parser.parse_intermixed_args(arguments)
    measure, shown = _PARTS[asked.part]
    asked.out.mkdir(parents=True, exist_ok=True)
    began = os.getloadavg()[0]
    found = measure(asked.out, asked.words)
    ended = os.getloadavg()[0]
    (asked.out / f"{asked.part}.json").write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding="utf-8")
    place = _HERE if asked.write_readme else asked.out
    content = f"{_machine(began, ended)}\n\n{shown(found, place)}"
    if asked.write_readme:
        replace_block(_HERE / "README.md", asked.part, content)
    else:
        print(content)
    return 0


def _images(found: Mapping[str, Any], place: Path) -> str:
    _, held_out = drawings.build()
    figures.draw(found, held_out, place / "images.png")
    tables = images.markdown(found), images.per_group(found, held_out.groups)
    return "\n\n".join([*tables, "![what the networks see](images.png)"])


def _text(found: Mapping[str, Any], place: Path) -> str:
    return text.markdown(found)


_PARTS: Mapping[str, tuple[Callable[[Path, Sequence[str]], dict[str, Any]], Callable[[Mapping[str, Any], Path], str]]]
_PARTS = {"images": (images.measure, _images), "text": (text.measure, _text)}
"""For each part what measures it, and what makes its tables of that and puts pictures into a folder."""


def _machine(began: float, ended: float) -> str:
    """What was measured on, with the load average over a minute, of this and all other work, at both ends."""
    at = datetime.now(UTC).date().isoformat()
    cores = len(os.sched_getaffinity(0))
    told = f"{platform.machine()} CPU with {cores} cores, one thread a rank, torch {torch.__version__}, {at}"
    return f"{told}; load average {began:.1f} at the start, {ended:.1f} at the end."


if __name__ == "__main__":
    raise SystemExit(main())
