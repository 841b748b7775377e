"""The tables of a factorial sweep over approximations: bytes at the peak, losses, and whether effects add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

from runner.recipes.compression.figures import Curve, draw

__all__ = ["FACTORS", "contrasts", "sweep_report"]

FACTORS = ("few bits", "randomized linear", "tensor train", "8-bit Adam")
_LAST_STEPS = 20  # their mean is the loss

Factors = frozenset[str]


def sweep_report(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tables and the figure, for ``runner report``.

    Args:
        runs: of each job its ``directory`` and its ``record``.
    """
    ended = {_factors(run["record"]): run["record"] for run in runs if run["record"]["status"] == "ok"}
    counted = {factors: _peak(record, "measured") for factors, record in ended.items()}
    losses = {factors: fmean(record["loss"][-_LAST_STEPS:]) for factors, record in ended.items()}
    order = sorted(ended, key=lambda factors: (len(factors), [FACTORS.index(each) for each in _in_order(factors)]))
    saved = {factors: counted[frozenset()] - counted[factors] for factors in order if frozenset() in counted}
    values = [_values(ended[factors], factors, counted, saved, losses) for factors in order]
    header = ("together", "peak predicted", "peak counted", "saved", "saved / sum of each alone", "loss", "val")
    notes = [
        "Bytes of live tensors at a step's peak, weights and optimizer states included, as the record counts them. "
        f"The loss is the mean of the last {_LAST_STEPS} steps.",
        *(f"{run['directory']}: {run['record']['status']}" for run in runs if run["record"]["status"] != "ok"),
    ]
    tables = [_table("approximations", "approximations, alone and together", header, values, notes)]
    if len(ended) == 2 ** len(FACTORS):
        both = zip(contrasts(losses), contrasts(saved), strict=True)
        rows = [(name, found, round(saves)) for (name, found), (_, saves) in both]
        text = ["Effect: the mean difference that a factor makes; a x b: half of what b changes in the effect of a."]
        names = ("effect of", "loss", "bytes saved")
        tables.append(_table("effects", "effects and interactions of two", names, rows, text))
    curves = [
        Curve(_name(factors), ended[factors]["loss"]) for factors in order if len(factors) in (0, 1, len(FACTORS))
    ]
    return {"tables": tables, "figures": {"approximations.svg": partial(draw, curves=curves)}}


def contrasts(values: Mapping[Factors, float]) -> list[tuple[str, float]]:
    """The main effects and the interactions of two factors, of values for all subsets of :data:`FACTORS`.

    The effect of a factor is the mean difference that it makes; the interaction of two is half the difference that one
    makes to the effect of the other. If effects add up, every interaction is 0.
    """
    effects = [*combinations(FACTORS, 1), *combinations(FACTORS, 2)]
    return [(" x ".join(names), _contrast(values, names)) for names in effects]


def _contrast(values: Mapping[Factors, float], names: Sequence[str]) -> float:
    signed = ((-1) ** (len(names) - len(factors & set(names))) * value for factors, value in values.items())
    return 2 * float(sum(signed)) / len(values)


def _factors(record: Mapping[str, Any]) -> Factors:
    """The factors that a request has."""
    config = record["config"]
    backward = config["approximate_backward"]["name"]
    present = (
        backward in ("fewbit", "both"),
        backward in ("randomized_linear", "both"),
        config["embedding"]["name"] == "tensor_train",
        config["optimizer"]["name"] == "adam8bit",
    )
    return frozenset(name for name, there in zip(FACTORS, present, strict=True) if there)


def _in_order(factors: Factors) -> list[str]:
    return [each for each in FACTORS if each in factors]


def _name(factors: Factors) -> str:
    return " + ".join(_in_order(factors)) or "none"


def _peak(record: Mapping[str, Any], kind: str) -> int:
    return int(max(record["peak_memory_bytes"][kind]))


def _values(
    record: Mapping[str, Any],
    factors: Factors,
    counted: Mapping[Factors, int],
    saved: Mapping[Factors, int],
    losses: Mapping[Factors, float],
) -> tuple[Any, ...]:
    alone = [saved.get(frozenset({each})) for each in factors]
    known = [each for each in alone if each is not None]
    share = saved[factors] / sum(known) if len(known) == len(factors) > 1 else None
    val = record["val_loss"][-1][1] if record["val_loss"] else None
    return (
        _name(factors), _peak(record, "predicted"), counted[factors], saved.get(factors), share, losses[factors], val,
    )  # fmt: skip


def _table(
    name: str, title: str, header: Sequence[str], values: Sequence[tuple[Any, ...]], notes: Sequence[str]
) -> dict[str, Any]:
    rows = [tuple(_cell(value) for value in row) for row in values]
    return {"name": name, "title": title, "header": header, "rows": rows, "values": values, "notes": list(notes)}


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
