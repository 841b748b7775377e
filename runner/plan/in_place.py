"""Rules for layers that are run again: they must give the same again, from an input that is still what it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.memory.solve.second_run import keeps_what_changes
from runner.memory.solve.values import ActivationPlan, ChainProgram, GraphProgram, Program
from runner.profile import LayerProfile, ModelProfile

__all__ = ["in_place_problems"]


def in_place_problems(config: RunConfig, profile: ModelProfile, plan: ActivationPlan) -> Iterator[Problem]:
    """Problems of programs that run a layer again from an input which has changed, and of cuts of shared memory."""
    section = config.activation_checkpoint
    for program in plan.stages:
        layer = _changed_before_it_runs_again(profile.layers, program)
        if layer is not None:
            rule = "must not run a layer again from an input that is changed in place"
            why = f"{_named(profile, layer)} changes its input in place, which is gone then"
            fix = "operators that are not in place (inplace=False), or activation_checkpoint=none"
            yield Problem("activation_checkpoint", section.target or section.name, rule, why, fix)
            return
    changed = next((at for program in plan.stages for at in _keeping_what_changes(profile.layers, program)), None)
    if changed is not None:
        rule = "must not keep outputs of operators that are changed in place"
        why = f"{_named(profile, changed)} has one that is, and its second run would be given what it became"
        fix = "operators that are not in place (inplace=False), or activation_checkpoint=full"
        yield Problem("activation_checkpoint", section.target or section.name, rule, why, fix)
        return
    again = next((at for program in plan.stages for at in _reruns(program) if not profile.layers[at].repeats), None)
    if again is not None:
        rule = "must not run a layer again that gives something else then"
        why = f"{_named(profile, again)} does, with the same input and random numbers: it has a state, or a generator"
        fix = "buffers for its state, or activation_checkpoint=none"
        yield Problem("activation_checkpoint", section.target or section.name, rule, why, fix)
    shared = next((at for at, row in enumerate(profile.layers) if row.writes_shared), None)
    if shared is not None and len(plan.stages) > 1:
        rule = "must not change a tensor in place while another one has the same memory"
        why = f"{_named(profile, shared)} does, and between stages each of the two is sent by itself"
        fix = "operators that are not in place, or parallelism.pipeline=1"
        yield Problem("model.target", config.model.target, rule, why, fix)


def _named(profile: ModelProfile, layer: int) -> str:
    name = profile.layers[layer].name
    return f"Layer {layer}" if name == str(layer) else f"Layer {layer} ({name})"


def _changed_before_it_runs_again(layers: Sequence[LayerProfile], program: Program) -> int | None:
    """The first layer that changes what a part of a program, or a layer of a graph program, begins with."""
    if isinstance(program, GraphProgram):
        return next((at for at in range(program.first, program.last + 1) if layers[at].writes), None)
    return _in_chain(layers, program) if isinstance(program, tuple) else None


def _reruns(program: Program) -> Iterable[int]:
    """The layers that are run again; none of a program that runs single operators again."""
    if isinstance(program, GraphProgram):
        return program.reruns
    chain = program if isinstance(program, tuple) else ()
    return [at for segment in chain if segment.recompute for at in range(segment.first, segment.last + 1)]


def _keeping_what_changes(layers: Sequence[LayerProfile], program: Program) -> Iterator[int]:
    """The layers of a chain program of which outputs of operators are kept that are changed in place.

    A graph program has none: see :func:`runner.memory.solve.graph.stage.operator_ways`.
    """
    for segment in program if isinstance(program, tuple) else ():
        if segment.save_ops is not None:
            reach = range(segment.first, segment.last + 1)
            yield from (at for at in reach if keeps_what_changes(layers, at, segment.save_ops))
        yield from _keeping_what_changes(layers, segment.inside)


def _in_chain(layers: Sequence[LayerProfile], program: ChainProgram) -> int | None:
    for segment in program:
        if segment.recompute:
            given = _given(layers, segment.first)
            made = {each.storage for row in layers[segment.first : segment.last + 1] for each in row.output} - given
            for at in range(segment.first, segment.last + 1):
                if set(layers[at].writes) - made:
                    return at
        found = _in_chain(layers, segment.inside)
        if found is not None:
            return found
    return None


def _given(layers: Sequence[LayerProfile], first: int) -> set[int]:
    """The storages of a layer's input; of the model's own, those that are used."""
    return {each.storage for each in layers[first - 1].output} if first else set(layers[0].reads or ())
