"""Moves layers between the ranks of a pipeline, between two steps: weights, buffers and optimizer states.

All that belongs to a layer is known by its names. Random numbers need nothing, because seeds depend on the step, the
micro-batch and the layer. Source of the idea: Zhao et al. 2021, vPipe, which moves layers between neighbouring stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.engine.transport.base import Channel, Handle, Transport
from runner.engine.transport.objects import receive_value, send_value
from runner.errors import RunFailedError
from runner.model.layers import LayerSource, StageModule
from runner.optim.states.moved import put_in, take_out
from runner.plan.cut.partition import Partition
from runner.strategy.checkpoints_by_name import num_bytes

__all__ = [
    "Belongings",
    "Move",
    "emptied",
    "kept_sources",
    "layers_in",
    "moves_between",
    "receive_layer",
    "require_movable",
    "send_layer",
    "tensors_of",
]


class Move(NamedTuple):
    """A layer that leaves one position of the pipeline for another one."""

    layer: int
    source: int
    target: int


class Belongings(NamedTuple):
    """What a rank keeps of weights beside its modules.

    Args:
        optimizer: holds its trained weights, and their states.
        averages: averages of trained weights, by global name.
        parameters: its parameters, by global name.
    """

    optimizer: Optimizer
    averages: dict[str, Tensor]
    parameters: Mapping[str, nn.Parameter]


def moves_between(before: Partition, after: Partition, placement: Sequence[int]) -> tuple[Move, ...]:
    """The layers that change their rank from one cut to another one, in the model's order.

    Args:
        before, after: first and last layer of each stage, inclusive.
        placement: the position of each stage.
    """
    old, new = (
        [placement[stage] for stage, (first, last) in enumerate(cut) for _ in range(first, last + 1)]
        for cut in (before, after)
    )
    return tuple(Move(layer, a, b) for layer, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)


def layers_in(stages: Iterable[StageModule]) -> dict[int, nn.Module]:
    """The modules of the layers of some stages, by their place in the model."""
    return {
        number: layer
        for stage in stages
        for number, layer in enumerate(stage.layers_between(stage.first_layer, stage.last_layer), stage.first_layer)
    }


def kept_sources(sources: Sequence[LayerSource], held: Mapping[int, nn.Module]) -> list[LayerSource]:
    """The layers of a model, of which those that a rank holds are not made again, also when they have left and come.

    Args:
        sources: the layers.
        held: the modules of those that the rank holds, by their place in the model.
    """
    return [
        replace(source, build=partial(_same, held[source.index])) if source.index in held else source
        for source in sources
    ]


def _same(layer: nn.Module) -> nn.Module:
    return layer


def require_movable(stages: Iterable[StageModule], moves: Iterable[Move]) -> None:
    """Refuse a move of what cannot be sent, or could not be told from what the model's function makes.

    Args:
        stages: the stage modules of this rank.
        moves: the layers that move.

    Raises:
        RunFailedError: a layer that moves has hooks or random numbers of its own, or a forward has given a buffer
            another shape.
    """
    leaving = {move.layer for move in moves}
    for stage in stages:
        grown = next(iter(stage.grown_buffers()), None)
        if grown is not None:
            raise RunFailedError(f"buffer {grown} has another shape than at the start, and {_STAYS}")
        for number, layer in layers_in([stage]).items():
            if number in leaving and any(_has_hooks(one) for one in (*layer.modules(), *layer.parameters())):
                raise RunFailedError(f"layer {number} has hooks, which would stay on their rank, and {_STAYS}")
            if number in leaving and any(
                isinstance(own, torch.Generator) for one in layer.modules() for own in vars(one).values()
            ):
                raise RunFailedError(
                    f"layer {number} draws from a generator of its own, which does not move, and {_STAYS}"
                )


_STAYS = "layers cannot move between stages so; partition.migrate=null keeps them where they are"


def _has_hooks(owner: object) -> bool:
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", _OF_WEIGHT
    return any(getattr(owner, kind, None) for kind in kinds)


_OF_WEIGHT = "_post_accumulate_grad_hooks"


def _channel(source: int, target: int) -> Channel:
    """A channel of its own for each direction, so that two ranks that exchange layers need not wait for each other."""
    return Channel.ACTIVATION if source < target else Channel.GRADIENT


def send_layer(
    layer: nn.Module, own: Belongings, transport: Transport, rank: int
) -> tuple[list[tuple[Handle, Tensor]], int]:
    """Start to send all that belongs to a layer to the rank that holds it from now on.

    Args:
        layer: the layer's module.
        own: what this rank keeps, afterwards without that of the layer's weights.
        transport: sends messages.
        rank: the global rank.

    Returns:
        the messages, which must stay alive until they have left, and the bytes of their tensors.
    """
    taken = _taken(layer, own)
    return send_value(taken, transport, rank, _channel(transport.rank, rank)), num_bytes(taken)


def _taken(layer: nn.Module, own: Belongings) -> dict[str, Any]:
    """All that belongs to a layer; its trained weights leave what the rank keeps of them."""
    parameters = dict(layer.named_parameters())
    numbers = {id(each) for each in parameters.values()}
    names = [name for name, each in own.parameters.items() if id(each) in numbers and name in own.averages]
    return {
        "parameters": {name: (each.data, each.requires_grad) for name, each in parameters.items()},
        "buffers": {name: (each, is_saved) for name, each, is_saved in _buffers(layer)},
        "modes": [module.training for module in layer.modules()],
        "states": {name: take_out(own.optimizer, each) for name, each in parameters.items() if each.requires_grad},
        "averages": {name: own.averages.pop(name) for name in names},
    }


def _buffers(layer: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """The buffers of a layer: name, tensor, and whether it is saved."""
    for path, module in layer.named_modules():
        for name, value in module._buffers.items():
            if value is not None:
                yield f"{path}.{name}".removeprefix("."), value, name not in module._non_persistent_buffers_set


def tensors_of(layer: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a layer."""
    return [*layer.parameters(), *layer.buffers()]


def emptied(layer: nn.Module, but: Iterable[Tensor] = ()) -> None:
    """Free the memory of a layer's weights and buffers; the module stays, for when the layer comes.

    Args:
        layer: the layer.
        but: tensors that others use, too.
    """
    kept = {id(each) for each in but}
    for each in tensors_of(layer):
        if id(each) not in kept:
            each.data = each.data.new_empty(0)


@torch.no_grad()
def receive_layer(layer: nn.Module, own: Belongings, transport: Transport, rank: int) -> int:
    """Receive what :func:`send_layer` has sent; return the bytes of its tensors.

    Args:
        layer: the layer's module, on this rank's device.
        own: what this rank keeps, whose optimizer has the groups of that rank's; afterwards also of this layer.
        transport: receives messages.
        rank: the global rank that has sent it.
    """
    came = receive_value(transport, rank, _channel(rank, transport.rank))
    for name, (value, is_trained) in came["parameters"].items():
        parameter = layer.get_parameter(name)
        parameter.data = value
        parameter.requires_grad_(is_trained)
    for name, (value, is_saved) in came["buffers"].items():
        path, _, last = name.rpartition(".")
        module = layer.get_submodule(path)
        module._buffers[last] = value
        if not is_saved:
            module._non_persistent_buffers_set.add(last)
    for module, mode in zip(layer.modules(), came["modes"], strict=True):
        module.training = mode
    for name, (group, states) in came["states"].items():
        put_in(own.optimizer, layer.get_parameter(name), group, states)
    own.averages.update(came["averages"])
    return num_bytes(came)
