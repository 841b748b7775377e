"""Programs that run layers again where the backward is in two parts: predicted peaks, the same bits, and seconds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from layouts import uniform
from plan_profiles import layer, model
from programs import Trained, make_blocks, measured_and_predicted, points, train_under
from test_budgets import SCALARS, blocks
from test_graph_programs import some_program
from test_memory_engine import make_gpt, token_loss, tokens
from torch import nn

from runner.config.compose.resolve import resolve
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.graph.stage import graph_of
from runner.memory.solve.values import ActivationPlan, Program, Segment, StageChain
from runner.plan.choices import stage_peak
from runner.plan.make import make_plan
from runner.plan.stages.figures import stage_figures
from runner.profile import SplitBackward

STAGES = uniform(10, 2)


def again(first: int, last: int, *inside: Segment) -> Segment:
    return Segment(first, last, recompute=True, inside=inside)


def program(kind: str, first: int, last: int) -> Program:
    """The program of a stage of five blocks."""
    if kind == "graph":
        return some_program(graph_of(StageChain(blocks(), first, last)), 1)
    of_stage: dict[str, tuple[Segment, ...]] = {
        "kept": (Segment(first, last),),
        "between": (Segment(first, first), again(first + 1, last - 1), Segment(last, last)),
        "nested": (
            again(first, first),
            again(first + 1, last, again(first + 1, first + 2), Segment(first + 3, last)),
        ),
    }
    return of_stage[kind]


def programs(kind: str) -> tuple[Program, ...]:
    """The programs of both stages."""
    return tuple(program(kind, first, last) for first, last in STAGES)


@cache
def trained(kind: str) -> Trained:
    return train_under(make_blocks, nn.functional.mse_loss, points(192), programs(kind), "zb_h1", count=3)


@pytest.mark.parametrize("kind", ["nested", "graph"])
def test_the_peak_of_a_split_backward_is_the_predicted_one_with_the_same_bits(kind: str) -> None:
    """The gradients of weights that I makes wait until it ends, and it makes all of layers that run again."""
    found, plain = trained(kind), trained("kept")
    assert found.losses == plain.losses
    assert [name for name in plain.weights if not torch.equal(plain.weights[name], found.weights[name])] == []
    for each, expected in zip(found.peaks, found.predicted, strict=True):
        assert 0.99 * expected <= each <= expected + SCALARS


def test_the_peak_with_hooks_on_what_is_saved_is_the_predicted_one() -> None:
    """What hooks fetch can be read once, so that I makes all gradients and leaves nothing to W."""
    found, told = measured_and_predicted(
        make_blocks, nn.functional.mse_loss, points(192), programs("between"), "zb_h1", count=3, to_host=True
    )
    for each, expected in zip(found, told, strict=True):
        assert 0.99 * expected <= each <= expected + SCALARS


def test_the_peak_of_a_gpt_whose_layers_differ_is_the_predicted_one() -> None:
    """Its embedding, norms and head have weights that a product of matrices does not have, or a larger one."""
    make = partial(make_gpt, 0.1, 16, 4)
    whole = (tuple(again(at, at) for at in range(3)), (again(3, 4), Segment(5, 5)))
    found, told = measured_and_predicted(make, token_loss, tokens(16), whole, "zb_h1")
    assert all(0.99 * expected <= each <= expected + SCALARS for each, expected in zip(found, told, strict=True))


def test_what_is_left_to_w_counts_as_that_in_a_stages_peak() -> None:
    (figures,) = stage_figures(blocks(), [(0, 9)])
    several, one = stage_peak(figures, 3), stage_peak(figures, 3, 1)
    left = figures.deferred_bytes + figures.deferred_input_bytes
    running = max(figures.forward_peak_bytes, figures.saved_bytes + figures.backward_peak_bytes)
    of_i = max(running, figures.saved_bytes + figures.input_backward_peak_bytes)
    assert (several, one) == (2 * figures.saved_bytes + running, 2 * min(left, figures.saved_bytes) + of_i)


def test_a_layer_that_runs_again_leaves_nothing_to_w() -> None:
    split = SplitBackward(deferred_bytes=36, input_bytes=10, gradient_bytes=10, transient_bytes=12)
    profile = model([layer(split=split)] * 2)
    row = profile.layers[0]
    plan = ActivationPlan(((again(0, 1),),))
    (plain,) = stage_figures(profile, [(0, 1)])
    (figures,) = stage_figures(adjusted(profile, plan), [(0, 1)])
    assert plain.weight_gradient_seconds == 2 * 0.5 * row.backward_seconds + profile.loss.split_seconds[1]
    assert figures.weight_gradient_seconds == profile.loss.split_seconds[1]
    more = 2 * (row.forward_seconds + 0.5 * row.backward_seconds)
    assert figures.input_gradient_seconds == pytest.approx(plain.input_gradient_seconds + more)
    assert figures.deferred_bytes == row.output_bytes < plain.deferred_bytes  # the loss reads it


def test_a_plan_says_what_a_split_backward_cannot_gain() -> None:
    profile = replace(blocks(), optimizer_bytes_per_gradient_byte=2.0)
    words = ["model=mlp", "parallelism.pipeline=2", "schedule=zb_h1", "schedule.microbatches=4", "data.batch_size=1024"]
    kept = make_plan(resolve(words), profile)
    full = make_plan(resolve([*words, "activation_checkpoint=full"]), profile)
    assert not any("stays in I" in line for line in kept.advice)
    assert any("its weights: layers are run again in the backward" in line for line in full.advice)
