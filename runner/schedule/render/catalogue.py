"""The output of ``runner schedule --list``: every schedule with its limits, formulas and source."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from runner.schedule.catalogue.registry import ALIASES, SPECS
from runner.schedule.kinds import Formulas, ScheduleSpec

__all__ = ["catalogue_json", "catalogue_text"]

_OWN = (
    "custom: the order that schedule.target, a function of yours, returns\n"
    "    or an option file conf/schedule/NAME.yaml of your own that has a target; docs/design.md has an example"
)
_LEGEND = (
    "D ranks with equal stages, T micro-batches, v chunks per rank, rank r; F, B, I and W are the durations of a\n"
    "rank's whole share: forward, backward, gradient of the input, gradient of the weights. Messages take no time."
)


def catalogue_json() -> list[dict[str, Any]]:
    """One entry for each schedule, as plain values.

    ``convergence`` is null if the survey's rating is not known here. ``formulas`` is null if the order is found by
    search or is the user's own. ``when`` in it is null if the formulas always hold.
    """
    return [
        {
            "name": spec.name,
            "aliases": _aliases(spec),
            "kind": spec.kind,
            "data_unit": spec.data_unit,
            "convergence": spec.convergence,
            "description": spec.description,
            "default_chunks": spec.default_chunks,
            "constraints": _constraints(spec),
            "formulas": None if spec.formulas is None else _formulas(spec.formulas),
            "source": spec.source,
        }
        for spec in SPECS.values()
    ]


def catalogue_text() -> str:
    """The same entries as a text for people."""
    return "\n\n".join([*map(_entry, SPECS.values()), _OWN, _LEGEND])


def _entry(spec: ScheduleSpec) -> str:
    kind = f"{spec.kind}, by {spec.data_unit}"
    if spec.convergence is not None:
        kind += f", convergence {spec.convergence} by the survey of Guan et al. 2024"
    lines = [
        f"{', '.join([spec.name, *_aliases(spec)])}: {spec.description}",
        f"    {kind}; {', '.join(f'{k} {rule}' for k, rule in _constraints(spec).items())}",
        f"    source: {spec.source}",
    ]
    if spec.formulas is not None:
        shown = {name: formula for name, formula in _formulas(spec.formulas).items() if formula is not None}
        lines += [f"    {name} {'' if name == 'when' else '= '}{formula}" for name, formula in shown.items()]
    return "\n".join(lines)


def _formulas(formulas: Formulas) -> dict[str, str | None]:
    return {name: None if formula == "True" else formula for name, formula in asdict(formulas).items()}


def _aliases(spec: ScheduleSpec) -> list[str]:
    return [alias for alias, meant in ALIASES.items() if meant == spec.name]


def _constraints(spec: ScheduleSpec) -> dict[str, str]:
    """Key of the request -> a text that describes its legal values."""
    return {
        "parallelism.pipeline": "at least 1" if spec.one_rank else spec.ranks.rule,
        "schedule.microbatches": spec.microbatches.rule,
        "schedule.chunks": spec.chunks.rule,
    }
