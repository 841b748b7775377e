"""Which of the published table's orderings hold in it, and which here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runner.recipes.rudalle.table5 import OPTIMIZERS, PUBLISHED, Cell, Key

__all__ = ["claims_table", "ordering_rows"]

Figures = Mapping[Key, float]
_EARLY_STEPS = 50


def claims_table(cells: Mapping[Key, Cell]) -> dict[str, Any]:
    """One row per claim: whether it holds in the paper and here, ``-`` where a figure is missing, and why."""
    rows = [
        *ordering_rows("memory", _present(cells, "state_bytes")),
        *ordering_rows("time", _present(cells, "seconds")),
        *ordering_rows("loss", _present(cells, "loss")),
        ("one optimizer: the first 50 losses equal across stages within 1e-3", "-", _early(cells), "same numbers"),
    ]
    header = ("claim", "paper", "here", "why")
    title = "orderings; memory is model states here, all that is reserved in the paper"
    return {"name": "table5_claims", "title": title, "header": header, "rows": rows, "values": rows, "notes": []}


def ordering_rows(kind: str, figures: Figures) -> list[tuple[str, str, str, str]]:
    """Of claims about ``memory``, ``time`` or ``loss``: name, whether it holds in the paper, in ``figures``, and why.

    ``-`` stands where a figure is missing.
    """
    column = list(_CLAIMS).index(kind)
    published = {key: values[column] for key, values in PUBLISHED.items()}
    return [(name, _holds(claim, published), _holds(claim, figures), why) for name, claim, why in _CLAIMS[kind]]


def _present(cells: Mapping[Key, Cell], name: str) -> dict[Key, float]:
    return {key: getattr(cell, name) for key, cell in cells.items() if getattr(cell, name) is not None}


def _holds(claim: Callable[[Figures], bool], figures: Figures) -> str:
    try:
        return "yes" if claim(figures) else "no"
    except KeyError:
        return "-"


def _falls(optimizer: str) -> Callable[[Figures], bool]:
    return lambda f: f[optimizer, 0] > f[optimizer, 1] > f[optimizer, 2] > f[optimizer, 3]


def _gain(f: Figures, stage: int) -> float:
    return f["adam", stage] - f["adam8bit", stage]


_MEMORY: tuple[tuple[str, Callable[[Figures], bool], str], ...] = (
    ("Adam: memory falls with the stage", _falls("adam"), "each stage shares out one part more"),
    ("Fused Adam: memory falls with the stage", _falls("fused_adam"), "as Adam"),
    (
        "8-bit Adam: memory falls with the stage",
        _falls("adam8bit"),
        "in the paper ZeRO 1 adds buckets and a flat fp32 copy of more than its states' share: 59.7 to 60.8",
    ),
    (
        "CPU Adam: memory falls from ZeRO 2 to 3",
        lambda f: f["cpu_adam", 2] > f["cpu_adam", 3],
        "weights are shared out",
    ),
    (
        "8-bit Adam below Adam at each stage",
        lambda f: all(f["adam8bit", s] < f["adam", s] for s in range(4)),
        "2 bytes of moments for 8",
    ),
    (
        "8-bit's gain at ZeRO 0 shrinks to less than 60 % once states are shared",
        lambda f: max(_gain(f, s) for s in (1, 2, 3)) < 0.6 * _gain(f, 0),
        "what is saved is divided by the replicas",
    ),
    (
        "CPU Adam below 8-bit Adam at ZeRO 2 and 3",
        lambda f: all(f["cpu_adam", s] < f["adam8bit", s] for s in (2, 3)),
        "no states on the device",
    ),
    (
        "Fused Adam as Adam",
        lambda f: all(abs(f["fused_adam", s] / f["adam", s] - 1) < 0.005 for s in range(4)),
        "the same states",
    ),
    (
        "1-bit Adam above Adam at ZeRO 0",
        lambda f: f["onebit_adam", 0] > f["adam", 0],
        "it keeps what compression left over",
    ),
)
_TIME: tuple[tuple[str, Callable[[Figures], bool], str], ...] = (
    (
        "ZeRO 3 slowest of the optimizers on the device",
        lambda f: all(f[o, 3] > max(f[o, s] for s in (0, 1, 2)) for o in ("adam", "adam8bit", "fused_adam")),
        "weights are gathered twice a step",
    ),
    (
        "ZeRO 2 no slower than 1, and 1 no slower than 0",
        lambda f: all(f[o, 2] <= f[o, 1] <= f[o, 0] for o in ("adam", "fused_adam")),
        "reductions overlap on fast links; on two CPU ranks times are overheads",
    ),
    (
        "CPU Adam slower than Adam at ZeRO 2 and 3",
        lambda f: all(f["cpu_adam", s] > f["adam", s] for s in (2, 3)),
        "a link and a host in the way; on a CPU there is none",
    ),
    (
        "1-bit Adam slowest at ZeRO 0",
        lambda f: f["onebit_adam", 0] > max(f[o, 0] for o in ("adam", "adam8bit", "fused_adam")),
        "packing signs costs more than a fast link saves",
    ),
)
_LOSS: tuple[tuple[str, Callable[[Figures], bool], str], ...] = (
    (
        "one optimizer: last losses equal across stages within 0.02",
        lambda f: all(_spread(f, o) < 0.02 for o in OPTIMIZERS),
        "the same arithmetic in another order",
    ),
    (
        "8-bit Adam within 0.01 of Adam",
        lambda f: all(abs(f["adam8bit", s] - f["adam", s]) < 0.01 for s in range(4)),
        "blocks of 256 keep the large moments",
    ),
    (
        "1-bit Adam within 0.03 of Adam",
        lambda f: abs(f["onebit_adam", 0] - f["adam", 0]) < 0.03,
        "errors are fed back; without bias correction early steps are longer",
    ),
)


# In the order of the published figures.
_CLAIMS = {"memory": _MEMORY, "time": _TIME, "loss": _LOSS}


def _spread(f: Figures, optimizer: str) -> float:
    values = [value for (name, _), value in f.items() if name == optimizer]
    if not values:
        raise KeyError(optimizer)
    return max(values) - min(values)


def _early(cells: Mapping[Key, Cell]) -> str:
    worst = None
    for optimizer in OPTIMIZERS:
        losses = [cell.losses[:_EARLY_STEPS] for (name, _), cell in cells.items() if name == optimizer and cell.losses]
        for own in losses[1:]:
            spread = max(abs(a - b) for a, b in zip(losses[0], own, strict=False))
            worst = spread if worst is None else max(worst, spread)
    return "-" if worst is None else f"{'yes' if worst < 1e-3 else 'no'} ({worst:.1e})"
