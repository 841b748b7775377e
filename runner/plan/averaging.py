"""How the weights of parallel pipelines are averaged, as a request asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from runner.config.schema import RunConfig
from runner.schedule.catalogue.registry import SPECS

__all__ = ["Averaging", "averaging_of"]


@dataclass(frozen=True, slots=True)
class Averaging:
    """The averaging of pipelines with weights of their own; :mod:`runner.optim.states.elastic` has the formulas.

    Args:
        pipes: P, the number of pipelines.
        elasticity: the part of its distance from the average by which a weight is drawn to it after a step.
        form: ``easgd`` or ``updates``.
    """

    pipes: int
    elasticity: float
    form: str


def averaging_of(config: RunConfig) -> Averaging | None:
    """The averaging of a request without problems; None if its pipelines do not train weights of their own."""
    asked, spec = config.schedule, SPECS.get(config.schedule.name)
    if spec is None or not spec.averaged_pipes:
        return None
    pipes, elasticity = asked.option("pipes") or spec.averaged_pipes, asked.option("elasticity")
    return Averaging(pipes, 1 / pipes if elasticity is None else elasticity, asked.option("variant") or "easgd")
