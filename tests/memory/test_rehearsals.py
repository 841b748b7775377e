"""Rehearsals: what a stage takes whose program decides in the run, to the byte, before it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_evicting import programs, ran
from test_graph_programs import Bench, bench
from torch import Tensor, nn

from runner.cli.request import checked
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.memory.apply.rehearse import rehearse, rehearse_stage
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.arena import ArenaProgram
from runner.memory.solve.evicting import EvictingProgram
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import ActivationPlan, Segment, StageChain
from runner.model.layers import layers_of
from runner.plan.choices import program_cost
from runner.plan.stages.figures import stage_figures
from runner.profile import Rehearsal, profile_from_json

LOSS_BYTES = 8
"""A loss and its gradient, which is counted neither as saved nor as made."""


def rehearsed(of: Bench, program: EvictingProgram) -> Rehearsal:
    torch.manual_seed(0)
    return rehearse_stage(layers_of(of.task.build(), 0), *of.task.batch, of.task.loss, program)


def knowing(chain: StageChain, *known: Rehearsal) -> StageChain:
    return replace(chain, profile=replace(chain.profile, rehearsals=known))


@pytest.mark.parametrize("policy", ["coop", "dtr"])
def test_the_predicted_peak_is_that_of_a_run(policy: str) -> None:
    of = bench("skips")
    make = STRATEGIES[policy].candidates
    assert make is not None
    options = {"online": True} if policy == "dtr" else {}
    found = [each.program for each in make(replace(of.chain, options=options))]
    pools = [program for program in found if isinstance(program, EvictingProgram)]
    assert len(pools) > 5
    for program in pools[:: len(pools) // 4]:
        peak, _ = ran(of, program)
        predicted = program_cost(knowing(of.chain, rehearsed(of, program)), program).peak_bytes
        assert 0 <= predicted + LOSS_BYTES - peak <= LOSS_BYTES
        assert predicted <= program_cost(of.chain, program).peak_bytes  # which is a bound


@pytest.mark.parametrize("name", ["skips", "U-Net"])
def test_a_pool_for_everything_has_the_figures_of_the_plain_stages(name: str) -> None:
    """Those are made from single layers; where the caller of a stage holds skips, too, their peaks are bounds."""
    of = bench(name)
    count = len(of.chain.layers)
    for cuts in ([(0, count - 1)], [(0, count // 2 - 1), (count // 2, count - 1)]):
        kept = ActivationPlan(tuple((Segment(*cut),) for cut in cuts))
        pools = tuple(EvictingProgram(a, z, "full", 10**12, 1, (0,) * (z - a + 1)) for a, z in cuts)
        known = knowing(of.chain, *(rehearsed(of, program) for program in pools)).profile
        plain = stage_figures(adjusted(of.chain.profile, kept), cuts)
        made = stage_figures(adjusted(known, ActivationPlan(pools)), cuts)
        for own, other in zip(plain, made, strict=True):
            assert own.saved_bytes == other.saved_bytes
            assert own.forward_peak_bytes == other.forward_peak_bytes
            above = other.backward_peak_bytes - own.backward_peak_bytes
            assert above <= LOSS_BYTES
            assert above >= 0 or (name == "skips" and len(cuts) > 1)
            assert other.later_backward_peak_bytes <= own.later_backward_peak_bytes + LOSS_BYTES
            assert other.growing_backward_peak_bytes <= own.growing_backward_peak_bytes + LOSS_BYTES
            assert (own.forward_seconds, own.backward_seconds) == (other.forward_seconds, other.backward_seconds)


def test_several_micro_batches_in_a_pool_are_not_rehearsed() -> None:
    assert all(each.wants_rehearsal for each in programs(bench("ResNet")))
    assert not any(each.wants_rehearsal for each in programs(bench("ResNet"), in_flight=2))


def test_a_pool_in_which_there_is_no_room_is_not_chosen() -> None:
    of = bench("ResNet")
    program = EvictingProgram(0, of.chain.last, "full", 1000, 1, (1,) * len(of.chain.layers))
    known = rehearsed(of, program)
    assert known == Rehearsal(repr(program), runs=False)
    everything = program_cost(of.chain, (Segment(0, of.chain.last),))
    price = program_cost(knowing(of.chain, known), program)
    assert price.peak_bytes > everything.peak_bytes


def test_a_profile_keeps_what_is_known_as_json() -> None:
    of = bench("skips")
    known = knowing(of.chain, rehearsed(of, programs(of)[-1])).profile
    assert profile_from_json(known.to_json()).rehearsals == known.rehearsals


class _Cell(nn.Module):
    """Torch's LSTM cell, which on a CPU works in place on what it has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(32, 32)

    def forward(self, value: Tensor) -> Tensor:
        hidden: Tensor = self.cell(value)[0]
        return hidden


def request(model: str) -> RunConfig:
    named = [f"model.target={__name__}:{model}", "data=random_regression", "loss=mse"]
    return checked([*named, "activation_checkpoint=coop", "memory_limit=1GB"])


def cells() -> nn.Module:
    return nn.Sequential(*(_Cell() for _ in range(6)), nn.Linear(32, 8))


def test_what_could_not_be_made_again_is_refused_before_a_run() -> None:
    config = request("cells")
    with pytest.raises(RequestError) as caught:
        rehearse(config, [ArenaProgram(0, 6, "full", 60_000, 1, (1,) * 7)], 64)
    (problem,) = caught.value.problems
    assert problem.path == "activation_checkpoint.name"
    assert "changes a tensor in place that a backward needs as it was" in problem.line()
    assert "Try activation_checkpoint=rotor" in problem.line()


def test_a_model_that_needs_real_tensors_keeps_its_bound() -> None:
    config = request("reading_values")
    assert rehearse(config, [ArenaProgram(0, 1, "full", 2000, 1, (1, 1))], 64) == ()


class _Reading(nn.Module):
    """Decides by the values of a tensor, which those without memory do not have."""

    def forward(self, value: Tensor) -> Tensor:
        return value if value.sum() > 0 else -value


def reading_values() -> nn.Module:
    return nn.Sequential(_Reading(), nn.Linear(32, 8))
