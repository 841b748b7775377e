"""The published table of optimizers by stages of ZeRO beside what plans of the full size predict, cell by cell.

Published is what torch's allocator reserved. Nothing is fitted to it: predicted are the published code's own tensors,
DeepSpeed's buffers and the allocator's rules, for the settings that the paper states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from runner.recipes.rudalle.table5 import NAMES, OPTIMIZERS, PUBLISHED, STAGES, Key
from runner.recipes.rudalle.table5_claims import ordering_rows

__all__ = ["errors", "plan_report"]


def plan_report(plans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table with title, header, rows and notes.

    Args:
        plans: the documents of ``runner plan -m --json``: of each the ``overrides``, and the plan or its ``problems``.
    """
    found = {key: plan for plan in plans if (key := _key(plan["overrides"])) is not None}
    rows, notes = [], []
    for optimizer in OPTIMIZERS:
        for stage in STAGES:
            plan = found.get((optimizer, stage))
            if plan is not None and "step_seconds" not in plan:
                notes.append(f"{NAMES[optimizer]}, ZeRO {stage}: {'; '.join(plan['problems'])}")
            elif plan is not None:
                rows.append((NAMES[optimizer], str(stage), *_row(plan, PUBLISHED.get((optimizer, stage)))))
    reserved = {key: plan["reserved_memory_bytes"] for key, plan in found.items() if plan.get("reserved_memory_bytes")}
    seconds = {key: plan["step_seconds"] for key, plan in found.items() if "step_seconds" in plan}
    header = ("optimizer", "ZeRO", "allocated GB", "reserved GB", "paper", "error", "seconds", "paper", "error")
    summary = [_summary("reserved memory", errors(reserved, 0, 1e9)), _summary("seconds", errors(seconds, 1, 1.0))]
    claims = [*ordering_rows("memory", reserved), *ordering_rows("time", seconds)]
    return {
        "title": "table 5 at full size: predicted, and the paper's",
        "header": header,
        "rows": rows,
        "notes": [*summary, *(f"{name}: paper {paper}, predicted {own}" for name, paper, own, _ in claims), *notes],
    }


def errors(predicted: Mapping[Key, float], column: int, unit: float) -> dict[Key, float]:
    """Of each cell that both have: predicted / published - 1."""
    return {key: value / unit / PUBLISHED[key][column] - 1 for key, value in predicted.items() if key in PUBLISHED}


def _key(overrides: Iterable[str]) -> Key | None:
    words = dict(word.split("=", 1) for word in overrides if "=" in word)
    key = (words.get("optimizer", ""), int(words.get("zero.stage", -1)))
    return key if key[0] in OPTIMIZERS and key[1] in STAGES else None


def _row(plan: Mapping[str, Any], published: tuple[float, float, float] | None) -> tuple[str, ...]:
    allocated, reserved, seconds = max(plan["peak_memory_bytes"]), plan["reserved_memory_bytes"], plan["step_seconds"]
    memory = _beside(reserved and reserved / 1e9, published and published[0], ".1f")
    return (f"{allocated / 1e9:.1f}", *memory, *_beside(seconds, published and published[1], ".2f"))


def _beside(value: float | None, published: float | None, form: str) -> tuple[str, str, str]:
    shown = "-" if value is None else f"{value:{form}}"
    if value is None or published is None:
        return shown, "-" if published is None else f"{published:{form}}", "-"
    return shown, f"{published:{form}}", f"{value / published - 1:+.1%}"


def _summary(name: str, found: Mapping[Key, float]) -> str:
    sizes = sorted(map(abs, found.values()))
    if not sizes:
        return f"{name}: no cell that the paper has"
    return f"{name}: {len(sizes)} cells, median error {median(sizes):.1%}, worst {sizes[-1]:.1%}"
