"""Which of a rank's parameters share a set of gradients.

Parameters with the same holders and the same first stage share a set, so that one message sums them and the norm counts
them on one rank. Those of one stage are apart from those that several stages use: the sum of the first may start when
the stage's last backward has ended, that of the others only at STEP, when every stage has added its share.
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
"""Makes the set of one stage, from ``(global name, parameter)`` pairs and the tag of one of them, if there is any."""


def stage_sets(
    stages: Mapping[int, StageModule], tags: Mapping[str, ParameterTag], keep: Keep
) -> dict[int, StageGradients]:
    """The gradients of each stage's own parameters; a stage that trains none has an empty set."""
    members: dict[int, list[tuple[str, Parameter]]] = {stage: [] for stage in stages}
    for tag, parameter in _trained(stages, tags):
        if not tag.spans_stages:
            members[tag.stages[0]].append((tag.name, parameter))
    return {stage: keep(pairs, tags[pairs[0][0]] if pairs else None) for stage, pairs in members.items()}


def tied_sets(stages: Mapping[int, StageModule], tags: Mapping[str, ParameterTag]) -> list[StageGradients]:
    """The gradients of parameters that several stages use, in an order that all ranks share."""
    members: dict[tuple[tuple[int, ...], int], list[tuple[str, Parameter]]] = defaultdict(list)
    for tag, parameter in _trained(stages, tags):
        if tag.spans_stages:
            members[tag.holders, tag.stages[0]].append((tag.name, parameter))
    return [StageGradients(members[key], tags[members[key][0][0]]) for key in sorted(members)]


def _trained(
    stages: Mapping[int, StageModule], tags: Mapping[str, ParameterTag]
) -> list[tuple[ParameterTag, Parameter]]:
    """The trained parameters, each once, in the tags' order."""
    own = named_parameters(stages)
    return [(tag, own[name]) for name, tag in tags.items() if tag.is_trained and name in own]
