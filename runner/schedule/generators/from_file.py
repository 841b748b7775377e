"""A schedule of the user's own, in the CSV form of torch.distributed.pipelining.

One row per rank; a cell is ``<stage><op><micro-batch>`` with op F, B, I, W or R (recompute, which torch does not have);
a blank cell is a bubble and says nothing, because the lists' order alone counts. Cells in which torch writes
communication or sharding (``0SEND_F1``, ``1RECV_B3``, ``0UNSHARD``, ``0RESHARD``, ``0REDUCE_GRAD``) are read over, so
that any file torch writes can be used: messages and reductions are always derived from the compute order here.
"""

from __future__ import annotations

import csv
import logging
import re
from pathlib import Path

from runner.errors import Problem, did_you_mean
from runner.schedule.check import check
from runner.schedule.values import COMPUTE, Action, Schedule, parse_action

__all__ = ["read_schedule"]

_logger = logging.getLogger(__name__)
_DERIVED = re.compile("[0-9]+(?:(?:SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")
_PATH = "schedule.file"


def read_schedule(file: str) -> Schedule | list[Problem]:
    """The checked schedule that ``file`` holds, or what is wrong with it."""
    rows = _rows(file)
    if rows and isinstance(rows[0], Problem):
        return [row for row in rows if isinstance(row, Problem)]
    actions = tuple(row for row in rows if not isinstance(row, Problem))
    if not any(actions):
        return [Problem(_PATH, file, "must hold at least one action", "Each row is one rank's list of cells like 0F0")]
    owner, problems = _placement(file, actions)
    if problems:
        return problems
    schedule = Schedule(
        name="from_file",
        placement=(tuple(owner[stage] for stage in range(len(owner))),),
        pipeline_of_microbatch=(0,) * (1 + max(a.microbatch or 0 for row in actions for a in row)),
        actions=actions,
        chunks=len(owner) // len(actions),
    )
    return [Problem(_PATH, file, defect) for defect in check(schedule)] or schedule


def _rows(file: str) -> list[tuple[Action, ...]] | list[Problem]:
    try:
        with Path(file).open(newline="", encoding="utf-8") as stream:
            cells = [row for row in csv.reader(stream) if row]
    except OSError as error:
        return [Problem(_PATH, file, "must be a readable file", error.strerror or str(error), _nearby(file))]
    except (UnicodeDecodeError, csv.Error) as error:
        return [Problem(_PATH, file, "must be a CSV text file", str(error))]
    rows: list[tuple[Action, ...]] = []
    problems: list[Problem] = []
    derived = 0
    for rank, row in enumerate(cells):
        actions: list[Action] = []
        for column, text in enumerate(cell.strip() for cell in row):
            if not text:
                continue
            if _DERIVED.fullmatch(text):
                derived += 1
                continue
            found = _compute(text)
            if isinstance(found, Action):
                actions.append(found)
            else:
                problems.append(Problem(_PATH, file, f"row {rank + 1}, cell {column + 1} ({text}): {found}"))
        rows.append(tuple(actions))
    if derived:
        _logger.info("%s: %d cells of communication or sharding read over; they are derived here", file, derived)
    return problems or rows


def _compute(text: str) -> Action | str:
    """The compute action a cell holds, or the rule it breaks."""
    if text.startswith("("):
        return "overlapped pairs are not available in this version; write the actions in two cells"
    try:
        action = parse_action(text)
    except ValueError:
        return "must be <stage><op><micro-batch> with op F, B, I, W or R, e.g. 2F0"
    if action.op not in COMPUTE:
        return "must be a compute action: F, B, I, W or R"
    return action


def _placement(file: str, actions: tuple[tuple[Action, ...], ...]) -> tuple[dict[int, int], list[Problem]]:
    """Stage -> rank as the rows say it, and what is wrong with that."""
    owner: dict[int, int] = {}
    problems = []
    for rank, row in enumerate(actions):
        for stage in sorted({action.stage for action in row}):
            if owner.setdefault(stage, rank) != rank:
                rule = f"stage {stage} must be on one rank, but rows {owner[stage] + 1} and {rank + 1} both have it"
                problems.append(Problem(_PATH, file, rule))
    microbatches = {action.microbatch for row in actions for action in row}
    for what, numbers in (("stages", owner.keys()), ("micro-batches", microbatches)):
        absent = next(number for number in range(len(numbers) + 1) if number not in numbers)
        if absent < len(numbers):
            rule = f"{what} must be numbered from 0 without gaps, but {absent} is in no cell"
            problems.append(Problem(_PATH, file, rule))
    counts = [sum(1 for rank in owner.values() if rank == mine) for mine in range(len(actions))]
    if len(set(counts)) > 1:
        rule = f"every rank must have the same number of stages, but the rows have {', '.join(map(str, counts))}"
        problems.append(Problem(_PATH, file, rule, "Costs and partition divide a rank's share evenly over its chunks"))
    return owner, problems


def _nearby(file: str) -> str:
    path = Path(file)
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = did_you_mean(path.name, names)
    return f"schedule.file={path.parent / near}" if near else ""
