"""Divides a rank's parameters into sets whose gradients are reduced together.

Parameters with the same holders and the same first stage are in one set, so that one message sums their gradients.
Parameters that only one stage uses are in other sets than those that several stages use. The sum of the former may
start when the stage's last backward has ended; the sum of the latter may start only at STEP, when every stage has added
its gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch.nn import Parameter

from runner.engine.update.gradients import StageGradients
from runner.model.layers import StageModule
from runner.model.tags import ParameterTag, named_parameters

__all__ = ["Keep", "stage_sets", "tied_sets"]

Keep: TypeAlias = Callable[[Sequence[tuple[str, Parameter]], ParameterTag | None], StageGradients]
"""Makes the set of one stage from ``(global name, parameter)`` pairs and the tag of one of them, or None."""


def stage_sets(
    stages: Mapping[int, StageModule], tags: Mapping[str, ParameterTag], keep: Keep
) -> dict[int, StageGradients]:
    """The gradients of the parameters that only one stage uses, by stage; a stage without any has an empty set."""
    members: dict[int, list[tuple[str, Parameter]]] = {stage: [] for stage in stages}
    for tag, parameter in _trained(stages, tags):
        if not tag.spans_stages:
            members[tag.stages[0]].append((tag.name, parameter))
    made = {stage: keep(pairs, tags[pairs[0][0]] if pairs else None) for stage, pairs in members.items()}
    return {stage: _counting(gradients, tags) for stage, gradients in made.items()}


def tied_sets(stages: Mapping[int, StageModule], tags: Mapping[str, ParameterTag]) -> list[StageGradients]:
    """The gradients of the parameters that several stages use, in an order that is the same on all ranks."""
    members: dict[tuple[tuple[int, ...], int], list[tuple[str, Parameter]]] = defaultdict(list)
    for tag, parameter in _trained(stages, tags):
        if tag.spans_stages:
            members[tag.holders, tag.stages[0]].append((tag.name, parameter))
    return [_counting(StageGradients(members[key], tags[members[key][0][0]]), tags) for key in sorted(members)]


def _counting(gradients: StageGradients, tags: Mapping[str, ParameterTag]) -> StageGradients:
    """The set, of which the norm counts what its tags say: parts of weights on every rank, whole ones on one."""
    gradients.counted = frozenset(name for name in gradients.names if tags[name].is_first_copy)
    return gradients


def _trained(
    stages: Mapping[int, StageModule], tags: Mapping[str, ParameterTag]
) -> list[tuple[ParameterTag, Parameter]]:
    """The trained parameters with their tags, each once, in the order of the tags."""
    own = named_parameters(stages)
    return [(tag, own[name]) for name, tag in tags.items() if tag.is_trained and name in own]
