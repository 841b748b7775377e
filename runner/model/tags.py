"""Describes a rank's parameters: which ranks hold, count and save them, and whether they are trained.

A :class:`ParameterTag` is made once for each parameter of a rank, when its stages are built. Gradient sets, the norm,
files, averages and K-FAC read it, and ask nobody else.

A shard is a part of a parameter along one dimension, within a group of ranks: the norm adds up the parts of the group,
and files join them. One kind of parameter is still to come, as a field of the tag that its first user adds: a delta is
trained on top of a frozen base, and files then hold the delta alone.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch.nn import Parameter

from runner.model.layers import StageModule
from runner.model.sharded.values import Shard
from runner.model.ties import Tie, crossing_ties

__all__ = ["ParameterTag", "holder_groups", "named_parameters", "tags_of", "tied_names"]


@dataclass(frozen=True)
class ParameterTag:
    """Describes one parameter of a rank.

    Args:
        name: its global name; the first one if it has several.
        names: all of its global names, in the model's order.
        stages: every stage of the model that uses it, ascending, also those of other ranks.
        holders: all global ranks with a copy, ascending: replicas, twins of pipelines that cross, and the ranks of its
            other stages. Its gradients are summed over them.
        is_first_copy: whether this rank's copy is the one in its pipeline that counts in the gradient norm and is
            saved in files.
        is_trained: whether it has a gradient and is updated; a frozen parameter is only held.
        shard: the part of the weight that it is; None: the whole.
    """

    name: str
    names: tuple[str, ...]
    stages: tuple[int, ...]
    holders: tuple[int, ...]
    is_first_copy: bool
    is_trained: bool
    shard: Shard | None = None

    @property
    def is_tied(self) -> bool:
        """Whether it has several names."""
        return len(self.names) > 1

    @property
    def spans_stages(self) -> bool:
        """Whether several stages use it: then its gradient is complete when all of them have added their shares."""
        return len(self.stages) > 1


def tags_of(
    stages: Mapping[int, StageModule],
    *,
    ties: Sequence[Tie],
    partition: Sequence[tuple[int, int]],
    ranks_of_stage: Callable[[int], Sequence[int]],
    later_copies: Container[int] = (),
    shards: Mapping[str, Shard] = MappingProxyType({}),
    is_first_shard: bool = True,
) -> dict[str, ParameterTag]:
    """The tags of a rank's parameters by global name.

    Parameters that several stages use come first, in the order of ``ties``, which is the same on every rank: the ranks
    that hold them sum their gradients in this order. The others come in the order of the stages.

    Args:
        stages: this rank's stages, with the modules on their device and ready to be trained.
        ties: the ties of the whole model.
        partition: first and last layer of each stage.
        ranks_of_stage: the global ranks that hold a stage, over all replicas.
        later_copies: stages of this rank whose first copy another rank of its pipeline holds.
        shards: the parts of weights that ranks divide, by any name of the weight.
        is_first_shard: whether this rank is the first one of such a group, which counts and saves whole weights.
    """
    tie_of = {tie.name: tie for tie in ties}
    found: dict[str, ParameterTag] = {}
    for stage, module in stages.items():
        for local_name, parameter in module.named_parameters(remove_duplicate=False):
            name = module.global_name(local_name)
            tie = tie_of.get(name)
            users = tie.stages(partition) if tie is not None else (stage,)
            shard = shards.get(name)
            is_first = users[0] in stages and users[0] not in later_copies
            found[name] = ParameterTag(
                name=name,
                names=_names_of(tie) if tie is not None else (name,),
                stages=users,
                holders=_holders(users, ranks_of_stage),
                is_first_copy=is_first and (shard is not None or is_first_shard),
                is_trained=parameter.requires_grad,
                shard=shard,
            )
    shared = {tie.name: found[tie.name] for tie in crossing_ties(ties, partition) if tie.name in found}
    return shared | found


def tied_names(tags: Mapping[str, ParameterTag]) -> set[str]:
    """The first names of the parameters that have several."""
    return {name for name, tag in tags.items() if tag.is_tied}


def holder_groups(
    ties: Sequence[Tie], partition: Sequence[tuple[int, int]], ranks_of_stage: Callable[[int], Sequence[int]]
) -> list[tuple[int, ...]]:
    """The ranks that hold each parameter that several stages use, the same on every rank.

    Args:
        ties, partition, ranks_of_stage: see :func:`tags_of`.
    """
    return [_holders(tie.stages(partition), ranks_of_stage) for tie in crossing_ties(ties, partition)]


def named_parameters(stages: Mapping[int, StageModule]) -> dict[str, Parameter]:
    """A rank's parameters by global name, in the order of the stages; each of a stage once."""
    return {
        module.global_name(name): parameter
        for module in stages.values()
        for name, parameter in module.named_parameters()
    }


def _names_of(tie: Tie) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for _, name in tie.places))


def _holders(stages: Sequence[int], ranks_of_stage: Callable[[int], Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted({rank for stage in stages for rank in ranks_of_stage(stage)}))
