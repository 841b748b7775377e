"""Treewidth: separators of a stage, the bound of what they keep, and programs with the same bits."""

from __future__ import annotations

from collections import Counter
from math import log2

import pytest
from plan_profiles import layer, model
from test_graph_programs import TASKS, Bench, bench, programs_of, runs_as_predicted

from runner.memory.solve.graph.separators import bags, deepest, separated_order
from runner.memory.solve.graph.stage import graph_of
from runner.memory.solve.graph.values import replayed
from runner.memory.solve.values import StageChain


def test_bags_have_what_later_layers_need() -> None:
    made = bench("U-Net").graph
    tensors = {index: made.graph.values[index].num_bytes for index in made.storages}
    for at in range(made.num_layers):
        crossing = {
            index
            for user, value in enumerate(made.graph.values[: made.num_forward])
            for index in value.needs
            if index in tensors and made.layers[index] <= at < made.layers[user]
        }
        assert bags(made)[at] == sum(tensors[index] for index in crossing)


def bound(of: Bench) -> int:
    """w bytes for each cut, the layer that runs, and the gradients between the layers."""
    made = of.graph
    values = made.graph.values
    one_layer = max(
        sum(value.num_bytes for index, value in enumerate(values[: made.num_forward]) if made.layers[index] == at)
        for at in range(made.num_layers + 1)
    )
    besides = max(value.transient_bytes for value in values)
    gradients = 2 * max(value.num_bytes for value in values[made.num_forward :])
    return max(bags(made)) * deepest(made) + 2 * one_layer + besides + gradients


@pytest.mark.parametrize("name", TASKS)
def test_the_peak_is_within_the_bound_and_each_cut_adds_one_forward_at_most(name: str) -> None:
    made = bench(name).graph
    depth = deepest(made)
    order = separated_order(made, depth)
    assert replayed(made.graph, order).peak_bytes <= bound(bench(name))
    runs = Counter(made.layers[index] for index in order if made.graph.values[index].is_run)
    assert max(runs.values()) <= 1 + depth
    assert [index for index in order if index >= made.num_forward] == list(
        range(made.num_forward, len(made.graph.values))
    )


def test_a_long_chain_keeps_as_many_tensors_as_its_logarithm() -> None:
    for count in (16, 64, 256):
        row = layer(saved_bytes=30, output_bytes=10, unsaved_forward_bytes=14, saves_output=False)
        made = graph_of(StageChain(model([row] * count), 0, count - 1))
        peak = replayed(made.graph, separated_order(made, deepest(made))).peak_bytes
        assert peak <= 10 * (log2(count) + 3) + 200


def test_without_cuts_everything_is_kept() -> None:
    made = bench("U-Net").graph
    assert separated_order(made, 0) == made.graph.once


@pytest.mark.parametrize("name", ["skips", "U-Net"])
def test_programs_give_the_same_bits_with_the_predicted_peak(name: str) -> None:
    programs = programs_of("treewidth", bench(name))
    assert 1 < len(programs) <= deepest(bench(name).graph)
    for program in programs:
        runs_as_predicted(name, program)
