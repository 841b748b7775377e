"""What tells the runs of a report from one another, in words."""

from __future__ import annotations

from typing import Any

from runner.config.short_names import short_names
from runner.record import ASKED_WORDS, FOUND_WORDS, RunRecord
from runner.report.read import Report

__all__ = ["chosen_layout", "has_overrides", "labels", "short_labels"]

_MOST = 6  # fields that are shown of a run; all are in the table of exact values
_FIRST = (
    *("model", "adapter", "data", "loss", "parallelism", "schedule", "partition", "zero", "offload"),
    *("activation_checkpoint", "optimizer", "lr_scheduler", "precision", "compression", "seed", "trainer"),
)
_LAST = ("name", "logger", "checkpoint", "launcher", "profiler", "report")
_SHIPPED = "runner."  # the functions behind shipped options, which are named by their options


def has_overrides(report: Report) -> bool:
    """Whether the runs are told apart by their overrides: those of one sweep."""
    is_one = report.is_sweep or len(report.runs) == 1
    return is_one and any("overrides" in run.record.extras for run in report.runs)


def labels(report: Report) -> list[str]:
    """What tells each run from the others: its overrides in a sweep, else the fields that differ; may be empty."""
    if has_overrides(report):
        return [" ".join(run.record.extras.get("overrides", [])) for run in report.runs]
    shown = _telling_apart_first(report, sorted(report.differing, key=_weight))
    return [_fields(report, index, shown) for index in range(len(report.runs))]


def chosen_layout(record: RunRecord) -> str:
    """What ``parallelism=auto`` chose for a job of a sweep, without degrees of 1 and the cut; ``-`` if nothing yet."""
    if FOUND_WORDS not in record.extras:
        return "-"
    new = [word for word in record.extras[FOUND_WORDS] if word not in record.extras[ASKED_WORDS]]
    left_out = ("partition", *(f"parallelism.{each}=1" for each in ("pipeline", "data", "tensor")))
    said = [word for word in new if not word.startswith(left_out) and not word.endswith("=null")]
    return short_names([said])[0] or "one rank"


def short_labels(report: Report) -> list[str]:
    """The same without the overrides that all runs of a sweep have, so that what differs stands first."""
    if not has_overrides(report) or len(report.runs) == 1:
        return labels(report)
    overrides = [run.record.extras.get("overrides", []) for run in report.runs]
    common = set(overrides[0]).intersection(*overrides)
    return [" ".join(word for word in own if word not in common) for own in overrides]


def _telling_apart_first(report: Report, paths: list[str]) -> list[str]:
    """The fields in their order, after those of them that tell runs apart which are the same until then."""
    first, told = list[str](), [""] * len(report.runs)
    for path in paths:
        values = report.differing[path]
        finer = [f"{known} {_text(value)}" for known, value in zip(told, values, strict=True)]
        says = any(_says_something(path, value) for value in values)
        if says and len(set(finer)) > len(set(told)):
            first.append(path)
            told = finer
    return [*first, *(path for path in paths if path not in first)]


def _fields(report: Report, index: int, paths: list[str]) -> str:
    """The fields of a run that not all runs have with the same value; what it lacks is not told."""
    own = [(path, report.differing[path][index]) for path in paths]
    told = [f"{path}={_text(value)}" for path, value in own if _says_something(path, value)]
    return " ".join([*told[:_MOST], *([f"(+{len(told) - _MOST})"] if len(told) > _MOST else [])])


def _says_something(path: str, value: Any) -> bool:
    """Whether a field is worth its room: options' own remarks, and what is empty, are not."""
    remark = path.split(".")[1:2] in (["needs"], ["goes_with"])
    return value not in (None, {}, []) and not remark and not str(value).startswith(_SHIPPED)


def _weight(path: str) -> tuple[bool, bool, int]:
    """The place of a field among those that differ: what decides most of a run comes first."""
    section = path.partition(".")[0]
    place = _FIRST.index(section) if section in _FIRST else len(_FIRST)
    return section in _LAST, ".kwargs." in path, place


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
