"""Draws what a stage takes under other budgets for its activations: one line for each strategy."""

from __future__ import annotations

import io
from typing import Any

from runner.config.units import byte_unit
from runner.memory.solve.values import Offer, StageChoice
from runner.plan.choice_notes import fronts, tightest
from runner.plan.values import RunPlan

__all__ = ["front_svg"]

_WIDTH, _HEIGHT = 7.0, 4.0  # inches
_MARKERS = "osD^v<>Pp*"


def front_svg(plan: RunPlan) -> str:
    """The picture, as SVG, of the stage that is slowed down most by its budget.

    A line falls from the least memory in which a strategy has a program to the memory of its fastest one. The cross is
    the program that the plan takes, and the dashed line is the budget.

    Args:
        plan: a plan whose programs were chosen under budgets.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    stage = tightest(plan.activations.choices)
    choice = plan.activations.choices[stage]
    unit, size = byte_unit(max(offer.peak_bytes for offer in choice.offers))
    fastest = choice.offers[0].seconds or 1.0

    def point(offer: Offer) -> tuple[float, float]:
        return offer.peak_bytes / size, offer.seconds / fastest

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "front", "font.size": 9}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, offers) in enumerate(fronts(choice).items()):
            marker = _MARKERS[number % len(_MARKERS)]
            style: dict[str, Any] = {"marker": marker, "markersize": 3, "linewidth": 1, "color": f"C{number}"}
            axes.plot(*zip(*map(point, offers), strict=True), label=name, drawstyle="steps-pre", **style)
        axes.plot(*point(choice.chosen), "x", color="black", markersize=9, label=f"taken: {choice.chosen.name}")
        if _is_near(choice):
            axes.axvline(choice.budget_bytes / size, color="0.5", linestyle="--", linewidth=1, label="budget")
        axes.set_xlabel(f"{unit} for activations of stage {stage}")
        axes.set_ylabel("time, 1.00 if all are kept")
        axes.set_xlim(left=0)
        axes.legend(fontsize=7, ncols=2)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _is_near(choice: StageChoice) -> bool:
    """Whether the budget is not so large that the lines would be a spot beside it."""
    return choice.budget_bytes <= 2 * max(offer.peak_bytes for offer in choice.offers)
