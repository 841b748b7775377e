"""Gradients of weights that several stages hold: summed over the holders before STEP, counted once in the norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from torch.nn import Parameter

from runner.engine.transport.base import Handle, Transport
from runner.engine.update.gradients import StageGradients
from runner.model.layers import StageModule
from runner.model.ties import Tie

__all__ = ["TiedGradients", "TiedWeight", "group_by_holders", "holder_groups", "tied_weights"]


@dataclass(frozen=True)
class TiedWeight:
    """This rank's copy of a weight that several stages hold.

    Args:
        name: its global name.
        parameter: the copy; stages of one rank share it.
        holders: all global ranks with a copy, over all replicas, rising.
        stage: the first one that uses it.
        counted: this rank's copy is the one of its pipeline that the gradient norm counts.
    """

    name: str
    parameter: Parameter
    holders: tuple[int, ...]
    stage: int
    counted: bool


class TiedGradients(StageGradients):
    """Gradients of tied weights with the same holders."""

    def __init__(self, weights: Sequence[TiedWeight]) -> None:
        pairs = ((weight.name, weight.parameter) for weight in weights)
        super().__init__(pairs, counted=weights[0].counted)
        self.holders = weights[0].holders

    def start(self, transport: Transport) -> list[Handle]:
        """Start summing over the holders, once every one of this rank's stages has added its share."""
        return self.reduce(transport, self.holders) if len(self.holders) > 1 else []


def holder_groups(
    ties: Sequence[Tie], partition: Sequence[tuple[int, int]], ranks_of_stage: Callable[[int], Sequence[int]]
) -> list[tuple[int, ...]]:
    """The ranks that hold each tied weight that crosses stages, the same on every rank.

    Args:
        ties: the model's.
        partition: first and last layer of each stage.
        ranks_of_stage: global ranks that hold a stage, over all replicas.
    """
    crossing = [stages for tie in ties if len(stages := tie.stages(partition)) > 1]
    return [tuple(sorted({rank for stage in stages for rank in ranks_of_stage(stage)})) for stages in crossing]


def tied_weights(
    ties: Sequence[Tie],
    partition: Sequence[tuple[int, int]],
    ranks_of_stage: Callable[[int], Sequence[int]],
    stages: Mapping[int, StageModule],
    later_copies: Container[int] = (),
) -> list[TiedWeight]:
    """This rank's copies of the weights that cross stages, frozen ones left out.

    Args:
        ties, partition, ranks_of_stage: as :func:`holder_groups` takes them.
        stages: this rank's.
        later_copies: those of them whose first copy another rank of the pipeline holds.
    """
    own = {
        module.global_name(name): parameter
        for module in stages.values()
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    crossing = [tie for tie in ties if len(tie.stages(partition)) > 1]
    groups = holder_groups(ties, partition, ranks_of_stage)
    return [
        TiedWeight(tie.name, own[tie.name], holders, first, counted=first in stages and first not in later_copies)
        for tie, holders in zip(crossing, groups, strict=True)
        for first in tie.stages(partition)[:1]
        if tie.name in own and own[tie.name].requires_grad
    ]


def group_by_holders(weights: Sequence[TiedWeight]) -> list[TiedGradients]:
    """One set of buffers for each group of holders, in an order that all ranks share."""
    groups: dict[tuple[tuple[int, ...], int], list[TiedWeight]] = defaultdict(list)
    for weight in weights:
        groups[weight.holders, weight.stage].append(weight)
    return [TiedGradients(groups[key]) for key in sorted(groups)]
