"""The published table of optimizers by stages of ZeRO beside what plans of the full size predict, cell by cell.

Published is what torch's allocator reserved. No number is fitted to it, but one setting was chosen by looking at it:
fp32 activations, where the paper names no precision and the public example has fp16. Predicted are the published code's
own tensors, DeepSpeed's buffers and the allocator's rules. As the cells differ little, errors alone say little: the
mean of the paper's cells has smaller ones. So the skill over that mean is told, too, and the differences between
stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from runner.recipes.benchmarks.reserved import reserved_by_request
from runner.recipes.rudalle.table5 import NAMES, OPTIMIZERS, PUBLISHED, STAGES, Key
from runner.recipes.rudalle.table5_claims import ordering_rows

__all__ = ["errors", "plan_report", "skill"]


def plan_report(plans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table with title, header, rows and notes.

    Args:
        plans: the documents of ``runner plan -m --json``: of each the ``overrides``, and the plan or its ``problems``.
    """
    found = {key: plan for plan in plans if (key := _key(plan["overrides"])) is not None}
    rows, notes = [], []
    planned = {key: plan["overrides"] for key, plan in found.items() if "step_seconds" in plan}
    reserved = reserved_by_request(planned)
    for optimizer in OPTIMIZERS:
        for stage in STAGES:
            plan = found.get((optimizer, stage))
            if plan is not None and "step_seconds" not in plan:
                notes.append(f"{NAMES[optimizer]}, ZeRO {stage}: {'; '.join(plan['problems'])}")
            elif plan is not None:
                rows.append(
                    (
                        NAMES[optimizer],
                        str(stage),
                        *_row(plan, reserved.get((optimizer, stage)), PUBLISHED.get((optimizer, stage))),
                    )
                )
    seconds = {key: plan["step_seconds"] for key, plan in found.items() if "step_seconds" in plan}
    header = ("optimizer", "ZeRO", "allocated GB", "reserved GB", "paper", "error", "seconds", "paper", "error")
    summary = [*_summary("reserved memory", reserved, 0, 1e9), *_summary("seconds", seconds, 1, 1.0)]
    summary += _differences(reserved)
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


def _row(
    plan: Mapping[str, Any], reserved: int | None, published: tuple[float, float, float] | None
) -> tuple[str, ...]:
    allocated, seconds = max(plan["peak_memory_bytes"]), plan["step_seconds"]
    memory = _beside(reserved and reserved / 1e9, published and published[0], ".1f")
    return (f"{allocated / 1e9:.1f}", *memory, *_beside(seconds, published and published[1], ".2f"))


def _beside(value: float | None, published: float | None, form: str) -> tuple[str, str, str]:
    shown = "-" if value is None else f"{value:{form}}"
    if value is None or published is None:
        return shown, "-" if published is None else f"{published:{form}}", "-"
    return shown, f"{published:{form}}", f"{value / published - 1:+.1%}"


def skill(predicted: Mapping[Key, float], column: int, unit: float) -> float | None:
    """1 - (squared errors of the prediction) / (squared errors of the paper's own mean), over the cells of both.

    1 is a perfect prediction, 0 one that is no better than the mean. None if the paper's cells do not differ.
    """
    both = {key: value / unit for key, value in predicted.items() if key in PUBLISHED}
    mean = fmean(PUBLISHED[key][column] for key in both) if both else 0.0
    spread = sum((PUBLISHED[key][column] - mean) ** 2 for key in both)
    return 1 - sum((value - PUBLISHED[key][column]) ** 2 for key, value in both.items()) / spread if spread else None


def _summary(name: str, predicted: Mapping[Key, float], column: int, unit: float) -> list[str]:
    found = errors(predicted, column, unit)
    sizes = sorted(map(abs, found.values()))
    if not sizes:
        return [f"{name}: no cell that the paper has"]
    said = [f"{name}: {len(sizes)} cells, median error {median(sizes):.1%}, worst {sizes[-1]:.1%}"]
    better = skill(predicted, column, unit)
    if better is not None:
        mean = fmean(PUBLISHED[key][column] for key in found)
        of_mean = median(abs(mean / PUBLISHED[key][column] - 1) for key in found)
        said.append(f"{name}: skill over the paper's mean {better:.2f}; that mean's median error is {of_mean:.1%}")
    return said


def _differences(reserved: Mapping[Key, float]) -> list[str]:
    """What each stage changes against the one before, in GB: predicted, and the paper's."""
    rows = []
    for optimizer in OPTIMIZERS:
        for before, after in pairwise(STAGES):
            keys = (optimizer, before), (optimizer, after)
            if all(key in reserved and key in PUBLISHED for key in keys):
                own = (reserved[keys[1]] - reserved[keys[0]]) / 1e9
                paper = PUBLISHED[keys[1]][0] - PUBLISHED[keys[0]][0]
                rows.append(f"{NAMES[optimizer]}, ZeRO {before} to {after}: {own:+.1f} GB, paper {paper:+.1f}")
    return rows
