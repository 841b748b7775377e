"""Runs of programs that offload strategies have chosen under a budget: the same bits, the planned bytes and peaks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import cycle

import pytest
import torch
from covering import sample
from test_memory_engine import CASES, SCALARS
from test_offload_choice import CHOOSING
from test_offload_moves import STEPS, Ran, run

from runner.memory.solve.offload import Offload, chain_program
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import ChainProgram, Segment, StageChain
from runner.plan.choices import ProgramChoice, program_cost
from runner.profile import LayerProfile, ModelProfile

FLOPS_OF_BYTE = 5.0  # of moves: the link takes about as long as what some layers compute


def by_flops(profile: ModelProfile) -> ModelProfile:
    def of(layer: LayerProfile) -> LayerProfile:
        return replace(layer, forward_seconds=layer.forward_flops, backward_seconds=layer.backward_flops)

    return replace(profile, layers=tuple(map(of, profile.layers)), loss=of(profile.loss))


def under(offload: Offload, share: float) -> Offload:
    """The programs that a strategy chooses where a stage may take a share of what it takes if it keeps everything."""

    def move(chain: StageChain, program: ChainProgram) -> ChainProgram:
        budget = round(share * program_cost(chain, program).peak_bytes)
        profile = by_flops(chain.profile)
        asked = replace(chain, profile=profile, budget_bytes=budget, copy_seconds=lambda size: size * FLOPS_OF_BYTE)
        return chain_program(ProgramChoice()(asked, offload.over(STRATEGIES["none"]))[0])

    return Offload(f"{offload.name} of {share}", move)


def mixed(chain: StageChain, program: ChainProgram) -> ChainProgram:
    """Layers that are run again, that are moved, and that are both, in turns."""
    ways = [(True, True), (False, True), (True, False), (False, False)]
    return tuple(
        Segment(layer, layer, recompute=again, moved=moved)
        for layer, (again, moved) in zip(chain.indices, cycle(ways), strict=False)
    )


@cache
def kept(case: str, pipeline: int, schedule: str) -> Ran:
    return run(case, None, pipeline=pipeline, schedule=schedule)


OFFLOADS = {each.name: each for each in (*CHOOSING, Offload("mixed", mixed))}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("case", "layout", "name"),
    sample({"case": CASES, "layout": ["1f1b 1", "1f1b 2", "zb_h1 2"], "name": OFFLOADS}),
)
def test_chosen_moves_change_no_bit_and_keep_to_their_plan(case: str, layout: str, name: str) -> None:
    (schedule, ranks), offload = layout.split(), OFFLOADS[name]
    pipeline = int(ranks)
    plain = kept(case, pipeline, schedule)
    asked = offload if offload.candidates is None else under(offload, 0.5)
    found = run(case, asked, pipeline=pipeline, schedule=schedule)
    assert found.losses == plain.losses
    assert [each for each in plain.weights if not torch.equal(plain.weights[each], found.weights[each])] == []
    assert found.moved == [STEPS * each for each in found.planned]
    assert found.left == [[0] * STEPS] * pipeline
    assert all(held <= most for held, most in zip(found.held, found.capacity, strict=True))
    assert all(real <= said + SCALARS for real, said in zip(found.peak, found.predicted, strict=True))
    if schedule == "1f1b":
        assert all(said <= 1.01 * real for real, said in zip(found.peak, found.predicted, strict=True))
