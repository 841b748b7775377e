"""Divides models and layers that bring no rules: what can be divided is found in the operators of their traces."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from runner.errors import RequestError
from runner.model.layers import LayerSource
from runner.model.sharded.finder import divided
from runner.model.sharded.group import OPERATORS
from runner.model.sharded.plan import Division
from runner.model.ties import tied_places
from runner.model.traced.operators import Program, trace
from runner.model.traced.segments import split

__all__ = ["divided_layers", "divided_programs", "whole_between_layers"]

_MAKE_WHOLE = (f"{OPERATORS}.all_reduce", f"{OPERATORS}.all_gather")  # the largest of all ranks, too


def divided_programs(model: nn.Module, programs: dict[bool, Program], division: Division) -> dict[bool, Program]:
    """The programs of one rank. The parameters of the model that are divided become its parts.

    Args:
        model: the traced model, whole.
        programs: its trace.
        division: is told what has been divided, and why other weights are whole.
    """
    found = divided(model, programs, division.group)
    division.left += [str(each) for each in found.left]
    division.take(model, found.shards)
    return found.programs


def whole_between_layers(programs: dict[bool, Program], shards: Collection[str]) -> dict[bool, Program]:
    """The programs of a model whose modules divide it, uncut where a value crosses of which each rank has a part.

    Args:
        programs: the trace of the divided model.
        shards: the names of the weights that are divided.
    """
    return {training: replace(each, uncut=each.uncut | _inside(each, shards)) for training, each in programs.items()}


def _inside(program: Program, shards: Collection[str]) -> frozenset[int]:
    """The positions between the making of a value that is not whole and its last use.

    What enters is counted among them: it is whole, but each rank has a part of its gradient.
    """
    parts = {weight for weight, name in program.weights.items() if name in shards}
    positions = {node: position for position, node in enumerate(program.nodes)}
    inside: set[int] = set()
    for position, node in enumerate(program.nodes):
        operator = str(node.target)
        enters = operator.startswith(OPERATORS) and not operator.startswith(_MAKE_WHOLE)
        if not enters and (operator.startswith(_MAKE_WHOLE) or parts.isdisjoint(node.all_input_nodes)):
            continue
        parts.add(node)
        inside.update(
            range(position + 1, max((positions.get(user, position) for user in node.users), default=position) + 1)
        )
    return frozenset(inside)


def divided_layers(sources: Sequence[LayerSource], inputs: Any, target: str, division: Division) -> list[LayerSource]:
    """The layers; those that exist and can be traced run the operators of their traces, divided.

    Args:
        sources: the layers of a model that lists them.
        inputs: a small batch for the first one, in the format of the weights.
        target: names the model in messages.
        division: is told what has been divided, and why other weights are whole.
    """
    made: list[LayerSource] = []
    value = inputs
    tied = {name for _, name in tied_places(sources)}
    segments: dict[int, nn.Module] = {}
    for source in sources:
        module = source.given
        if module is None:  # it exists only when it is built; a tensor_plan() would say how
            division.left.append(f"left whole: layer {source.index}: it is built later, and has no tensor_plan()")
            return [*made, *sources[len(made) :]]
        with torch.no_grad():
            after = source.calling(module)(value)
        if id(module) not in segments:
            names = {source.full_name(name) for name, _ in module.named_parameters()}
            is_tied = not names.isdisjoint(tied) and sum(other.given is module for other in sources) == 1
            segments[id(module)] = module if is_tied else _segment(module, value, source, target, division)
        segment = segments[id(module)]
        made.append(source if segment is module else replace(source, given=segment, build=_returning(segment)))
        value = after
    return made


def _segment(module: nn.Module, value: Any, source: LayerSource, target: str, division: Division) -> nn.Module:
    """The layer as its divided trace, or itself if nothing of it can be divided."""
    with suppress(RequestError):
        programs = trace(module, value, target)
        found = divided(module, programs, division.group)
        division.left += [str(replace(each, name=source.full_name(each.name))) for each in found.left]
        if found.shards:
            division.take(module, found.shards, source)
            ((_, segment),) = split(module, found.programs, [])
            division.programs[segment] = module, found.programs
            return segment
        return module
    division.left.append(f"left whole: layer {source.index}: it cannot be traced")
    return module


def _returning(module: nn.Module) -> Any:
    return lambda: module
