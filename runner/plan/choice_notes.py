"""Tells how the programs of stages were chosen under a budget, and what other budgets would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from runner.config.units import format_bytes, format_seconds
from runner.memory.solve.values import Offer, StageChoice

__all__ = ["choice_document", "choice_notes", "front", "front_table", "fronts", "tightest"]

_BUDGETS = 8  # rows of the table: budgets from what the fastest program takes to the least possible


def choice_notes(chooser: str, choices: Sequence[StageChoice]) -> tuple[str, ...]:
    """What was chosen where that is not simply what was asked for, what would be faster, and what is the least
    memory; empty without choices.

    Args:
        chooser: the override that names the strategy.
        choices: how each stage's program was chosen.
    """
    if not choices:
        return ()
    stage = tightest(choices)
    choice = choices[stage]
    least = min(choice.offers, key=lambda offer: offer.peak_bytes)
    grouped = [(told, group) for told, group in _grouped(choices) if told != chooser.partition("=")[2]]
    chosen = "; ".join(f"{_stages(group)} {told}" for told, group in grouped)
    return (
        *([f"{chooser} takes {chosen}"] if chosen else []),
        _faster(stage, choice),
        f"stage {stage} can do with {format_bytes(least.peak_bytes)} at least, "
        f"by {least.name} in {format_seconds(least.seconds)}",
    )


def tightest(choices: Sequence[StageChoice]) -> int:
    """The stage whose program is slowed down most by its budget."""
    return max(range(len(choices)), key=lambda stage: choices[stage].chosen.seconds / _fastest_seconds(choices[stage]))


def front(offers: Sequence[Offer]) -> list[Offer]:
    """The offers for which there is none that is as fast and smaller, from the fastest to the smallest."""
    found: list[Offer] = []
    for offer in offers:
        if not found or offer.peak_bytes < found[-1].peak_bytes:
            found.append(offer)
    return found


def fronts(choice: StageChoice) -> dict[str, list[Offer]]:
    """The front of each strategy by itself, also of those that others beat, in the order of their fastest programs."""
    own: dict[str, list[Offer]] = {}
    for offer in choice.offers:
        own.setdefault(_strategy(offer), []).append(offer)
    return {name: front(offers) for name, offers in own.items()}


def front_table(choice: StageChoice) -> tuple[list[str], list[list[str]]]:
    """The columns and the rows of a table: for each budget, the least seconds of each strategy relative to the fastest.

    Strategies that never have a program on the common front are left out.
    """
    best = front(choice.offers)
    names = list(dict.fromkeys(_strategy(offer) for offer in best))
    rows = []
    for budget in _budgets(best):
        cells = []
        for name in names:
            own = [x.seconds for x in choice.offers if _strategy(x) == name and x.peak_bytes <= budget]
            cells.append(f"{min(own) / _fastest_seconds(choice):.2f}" if own else "-")
        rows.append([format_bytes(budget), *cells])
    return ["budget", *names], rows


def choice_document(choices: Sequence[StageChoice]) -> list[dict[str, Any]]:
    """The choices of ``runner plan --json``, one for each stage, with the fronts of all offers and of each strategy."""
    return [
        {
            "chosen": choice.chosen._asdict(),
            "budget_bytes": choice.budget_bytes,
            "front": [offer._asdict() for offer in front(choice.offers)],
            "fronts": {name: [offer._asdict() for offer in own] for name, own in fronts(choice).items()},
        }
        for choice in choices
    ]


def _faster(stage: int, choice: StageChoice) -> str:
    faster = [offer for offer in front(choice.offers) if offer.seconds < choice.chosen.seconds]
    budget = format_bytes(choice.budget_bytes)
    if not faster:
        return f"nothing is faster; stage {stage} may take {budget}"
    offer = faster[-1]
    return (
        f"faster for stage {stage} is {offer.name} in {format_seconds(offer.seconds)}, which needs "
        f"{format_bytes(offer.peak_bytes)} of the {budget} that the stage may take"
    )


def _grouped(choices: Sequence[StageChoice]) -> Iterator[tuple[str, list[int]]]:
    """Consecutive stages with the same choice, and what is told of it."""

    def told(stage: int) -> str:
        offer = choices[stage].chosen
        more = offer.seconds / _fastest_seconds(choices[stage]) - 1
        return f"{offer.name} ({more:.0%} more time than with enough memory)" if more > 0 else offer.name

    for text, stages in groupby(range(len(choices)), key=told):
        yield text, list(stages)


def _stages(stages: Sequence[int]) -> str:
    return f"for stage {stages[0]}" if len(stages) == 1 else f"for stages {stages[0]}-{stages[-1]}"


def _fastest_seconds(choice: StageChoice) -> float:
    return choice.offers[0].seconds or 1.0


def _strategy(offer: Offer) -> str:
    return offer.name.split()[0]


def _budgets(best: Sequence[Offer]) -> list[int]:
    """Budgets in equal steps from the fastest offer's peak to the least peak."""
    most, least = best[0].peak_bytes, best[-1].peak_bytes
    if most == least:
        return [most]
    return [most - (most - least) * number // (_BUDGETS - 1) for number in range(_BUDGETS)]
