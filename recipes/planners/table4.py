"""Table 4 of the survey on large-scale training: what approaches combine, and what decides it, beside the catalogue's.

What was printed is data here; what the runner's planners decide, and by what, is what the catalogue says of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runner.plan.planners.published.registry import KINDS

__all__ = ["PRINTED", "Printed", "differences", "lines"]

_AXES = ("TP", "DP", "PP", "checkpointing")


@dataclass(frozen=True)
class Printed:
    """A row as it was printed.

    Args:
        combined: the kinds of parallelism.
        decided: what its algorithm decides; empty: it has none.
        by: the algorithm.
        planner: the planner of the catalogue; None: the approach has none, or it is told in ``why``.
        why: what differs in kind, in words.
    """

    combined: tuple[str, ...]
    decided: tuple[str, ...]
    by: str
    planner: str | None
    why: str = ""


PRINTED = {
    "GPipe": Printed(("DP", "PP"), (), "", None),
    "Megatron-LM": Printed(("TP", "DP", "PP"), ("TP", "DP", "PP"), "heuristic", "megatron"),
    "PipeDream": Printed(("DP", "PP"), ("DP", "PP"), "dynamic program", "pipedream"),
    "PipeDream-2BW": Printed(
        ("DP", "PP"),
        ("DP", "PP", "checkpointing"),
        "dynamic program",
        "2bw",
        "its public planner enumerates, and so does ours",
    ),
    "DAPPLE": Printed(("DP", "PP"), ("DP", "PP"), "dynamic program", "dapple"),
    "PipeMare": Printed(
        ("PP",), ("PP",), "weights split evenly", None, "no planner: `partition=parameters` evens out weights"
    ),
    "Piper": Printed(("TP", "DP", "PP"), ("TP", "DP", "PP", "checkpointing"), "dynamic program", "piper"),
    "HetPipe": Printed(
        ("DP", "PP"),
        ("PP",),
        "linear program",
        "hetpipe",
        "a dynamic program with the linear program's solutions; devices are alike",
    ),
    "Pipe-torch": Printed(
        ("DP", "PP"), ("DP", "PP"), "dynamic program", "pipe_torch", "GPUs are not allocated: devices are alike"
    ),
    "Varuna": Printed(("DP", "PP"), ("DP", "PP"), "heuristic cuts, brute force over depths", "varuna"),
    "GEMS": Printed(("DP", "PP"), (), "", None),
    "Chimera": Printed(("DP", "PP"), ("DP", "PP"), "greedy micro-batch, brute force over depths", "chimera"),
}
"""The table's rows."""


def differences(name: str) -> str:
    """Where the catalogue differs from a row; empty: nowhere."""
    row = PRINTED[name]
    told = [row.why] if row.why else []
    if row.planner is not None:
        ours, theirs = set(KINDS[row.planner].axes), set(row.decided)
        more = [axis for axis in _AXES if axis in ours - theirs]
        less = [axis for axis in _AXES if axis in theirs - ours]
        told += [f"decides {' and '.join(more)}, too"] if more else []
        told += [f"does not decide {' and '.join(less)}"] if less else []
    return "; ".join(told)


def lines() -> Iterator[str]:
    """The table in Markdown."""
    yield "| approach | combines | printed: decided by | here: decided | by | differs |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, row in PRINTED.items():
        printed = f"{row.by} for {', '.join(row.decided)}" if row.decided else "-"
        kind = KINDS[row.planner] if row.planner is not None else None
        here = f"`{row.planner}`: {', '.join(kind.axes)}" if kind is not None else "-"
        by = kind.by if kind is not None else "-"
        yield f"| {name} | {', '.join(row.combined)} | {printed} | {here} | {by} | {differences(name) or '-'} |"
