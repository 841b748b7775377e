"""Whether what must hold of the small table does: ``python -m runner.recipes.rudalle.table5_check DIR``.

One line per assertion on a sweep's directory. Exit status 1 where one does not hold or a cell is missing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from runner.recipes.rudalle.table5 import OPTIMIZERS, PUBLISHED, STAGES, Cell, Key, cells_of

__all__ = ["Finding", "check", "main"]

Finding = tuple[str, bool | None, str]
"""What must hold, whether it does (None: a figure is missing), and the figure that says so."""

Cells = Mapping[Key, Cell]
_EARLY_STEPS = 50
_REPLICAS = 2


def check(cells: Cells) -> list[Finding]:
    """Each assertion on a sweep's cells."""
    asserted: list[tuple[str, Callable[[Cells], tuple[bool, str]]]] = [
        ("the paper's 15 cells have numbers, every other one has them or a reason", _complete),
        ("state bytes fall with the stage: Adam, Fused Adam, CPU Adam", _fall),
        ("state bytes fall from ZeRO 1 on: 8-bit Adam, whose ZeRO 1 adds a copy of what it updates", _fall_8bit),
        ("state bytes are the predicted ones within 2 %", _as_predicted),
        ("8-bit Adam below Adam at each stage", _below(("adam8bit", "adam"), STAGES)),
        ("8-bit's gain is divided by the replicas once states are shared", _gain_divided),
        ("CPU Adam below 8-bit Adam on the device, ZeRO 2 and 3", _below(("cpu_adam", "adam8bit"), (2, 3))),
        ("1-bit Adam above Adam at ZeRO 0", _below(("adam", "onebit_adam"), (0,))),
        ("Fused Adam as Adam, at each stage", _same_states),
        ("first 50 losses equal across stages within 1e-3", lambda c: _at_most(_early_spread(c), 1e-3)),
        ("last losses equal across stages within 0.02", lambda c: _at_most(_last_spread(c), 0.02)),
        ("8-bit Adam's last losses within 0.01 of Adam's", lambda c: _at_most(_from_adam(c, "adam8bit"), 0.01)),
        ("1-bit Adam's last loss within 0.03 of Adam's", lambda c: _at_most(_from_adam(c, "onebit_adam"), 0.03)),
    ]
    return [(name, *_tried(holds, cells)) for name, holds in asserted]


def _tried(holds: Callable[[Cells], tuple[bool, str]], cells: Cells) -> tuple[bool | None, str]:
    try:
        return holds(cells)
    except (KeyError, ValueError) as error:
        return None, f"missing: {error}"


def _complete(cells: Cells) -> tuple[bool, str]:
    done = {key for key, cell in cells.items() if cell.status == "ok"}
    refused = {key for key, cell in cells.items() if cell.status == "unsupported" and cell.reason}
    every = {(optimizer, stage) for optimizer in OPTIMIZERS for stage in STAGES}
    return done >= set(PUBLISHED) and done | refused == every, f"{len(done)} and {len(refused)}"


def _bytes(cells: Cells, optimizer: str, stage: int) -> float:
    found = cells[optimizer, stage].state_bytes
    if found is None:
        raise KeyError((optimizer, stage))
    return found


def _ran(cells: Cells, optimizer: str) -> list[int]:
    return [stage for stage in STAGES if cells.get((optimizer, stage), Cell("missing")).status == "ok"]


def _fall(cells: Cells) -> tuple[bool, str]:
    steps = [
        _bytes(cells, optimizer, after) / _bytes(cells, optimizer, before)
        for optimizer in ("adam", "fused_adam", "cpu_adam")
        for before, after in pairwise(_ran(cells, optimizer))
    ]
    return max(steps) < 1, f"at most {max(steps):.3f} of the stage before"


def _fall_8bit(cells: Cells) -> tuple[bool, str]:
    """The partition that the optimizer updates is a copy: with two replicas more than half of 8-bit moments saves."""
    sizes = [_bytes(cells, "adam8bit", stage) for stage in STAGES]
    return sizes[1] > sizes[2] > sizes[3], f"to ZeRO 0 as {', '.join(f'{size / sizes[0]:.3f}' for size in sizes)}"


def _as_predicted(cells: Cells) -> tuple[bool, str]:
    off = [
        abs(cell.state_bytes / cell.predicted_bytes - 1)
        for cell in cells.values()
        if cell.state_bytes is not None and cell.predicted_bytes
    ]
    return max(off) < 0.02, f"at most {max(off):.2%} off"


def _below(pair: tuple[str, str], stages: tuple[int, ...]) -> Callable[[Cells], tuple[bool, str]]:
    def holds(cells: Cells) -> tuple[bool, str]:
        ratios = [_bytes(cells, pair[0], stage) / _bytes(cells, pair[1], stage) for stage in stages]
        return max(ratios) < 1, "ratios " + ", ".join(f"{ratio:.3f}" for ratio in ratios)

    return holds


def _gain_divided(cells: Cells) -> tuple[bool, str]:
    gains = [_bytes(cells, "adam", stage) - _bytes(cells, "adam8bit", stage) for stage in STAGES]
    ratios = [gain / gains[0] for gain in gains[1:]]
    return all(abs(ratio * _REPLICAS - 1) < 0.05 for ratio in ratios), ", ".join(f"{ratio:.3f}" for ratio in ratios)


def _same_states(cells: Cells) -> tuple[bool, str]:
    off = [abs(_bytes(cells, "fused_adam", stage) / _bytes(cells, "adam", stage) - 1) for stage in STAGES]
    return max(off) < 0.02, f"at most {max(off):.2%} off"


def _at_most(found: float, limit: float) -> tuple[bool, str]:
    return found < limit, f"{found:.1e}"


def _early_spread(cells: Cells) -> float:
    return max(
        abs(one - other)
        for optimizer in OPTIMIZERS
        for stage in _ran(cells, optimizer)[1:]
        for one, other in _pairs(cells, optimizer, stage)
    )


def _pairs(cells: Cells, optimizer: str, stage: int) -> Iterator[tuple[float, float]]:
    first = cells[optimizer, _ran(cells, optimizer)[0]].losses[:_EARLY_STEPS]
    return zip(first, cells[optimizer, stage].losses[:_EARLY_STEPS], strict=True)


def _loss(cells: Cells, optimizer: str, stage: int) -> float:
    found = cells[optimizer, stage].loss
    if found is None:
        raise KeyError((optimizer, stage))
    return found


def _last_spread(cells: Cells) -> float:
    losses = [[_loss(cells, optimizer, stage) for stage in _ran(cells, optimizer)] for optimizer in OPTIMIZERS]
    return max(max(own) - min(own) for own in losses)


def _from_adam(cells: Cells, optimizer: str) -> float:
    return max(abs(_loss(cells, optimizer, s) - _loss(cells, "adam", s)) for s in _ran(cells, optimizer))


def main(directory: str) -> int:
    """Print a line per assertion; 1 where one does not hold."""
    records = sorted(Path(directory).glob("*/record.json"))
    runs = [{"directory": str(path.parent), "record": json.loads(path.read_text("utf-8"))} for path in records]
    findings = check(cells_of(runs))
    for name, holds, figure in findings:
        print(f"{'holds' if holds else 'MISSING' if holds is None else 'FAILS':8}{name}: {figure}")
    return 0 if all(holds for _, holds, _ in findings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
