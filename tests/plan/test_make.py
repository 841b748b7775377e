from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from plan_profiles import layer, model

from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import Segment, StageChain
from runner.plan.make import make_plan, plan_problems
from runner.plan.render import to_table
from runner.plan.values import Link, RunPlan
from runner.profile import ModelProfile
from runner.schedule.catalogue import registry
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.simulation.clock import StageCosts, simulate


def request(**overrides: Any) -> RunConfig:
    """``a__b=v`` for ``a.b=v``, ``a=v`` for the option v of group a (or the plain key)."""
    config = RunConfig(memory_limit="1GB")
    for path, value in overrides.items():
        override(config, path.replace("__", "."), value)
    return config


def override(config: RunConfig, path: str, value: Any) -> None:
    section, _, key = path.partition(".")
    target: Any = getattr(config, section)
    if key or not isinstance(target, str | int | None):
        setattr(target, key or "name", value)
    else:
        setattr(config, section, value)


def typed(config: RunConfig, proposal: str) -> RunConfig:
    """A request with the words of a proposal."""
    for change in proposal.split():
        path, value = change.split("=")
        override(config, path, None if value == "null" else int(value) if value.isdigit() else value)
    return config


def planned(profile: ModelProfile | None = None, **overrides: Any) -> RunPlan:
    return make_plan(request(**overrides), profile or model([layer()] * 8))


PIPELINE: dict[str, Any] = {"parallelism__pipeline": 4, "schedule__microbatches": 8, "data__batch_size": 8}


def test_the_json_document_has_the_contracts_keys() -> None:
    document = json.loads(json.dumps(planned(**PIPELINE, parallelism__data=2).to_json()))
    contract = {
        "fits", "memory_limit_bytes", "peak_memory_bytes", "parts", "step_seconds", "seconds_source",
        "bubble_ratio", "partition", "layout", "problems",
    }  # fmt: skip
    assert set(document) == contract | {
        "advice", "in_flight_microbatches", "host_memory_bytes", "host_memory_limit_bytes", "state_bytes",
        "schedule", "microbatches", "chunks", "parameters", "trained_parameters", "layers",
        "input_shapes", "samples_per_step", "tokens_per_step", "samples_per_second", "tokens_per_second", "mfu",
        "bytes_moved", "offload_seconds", "step_seconds_expected",
    }  # fmt: skip
    assert document["layout"] == {"pipeline": 4, "data": 2, "tensor": 1, "world_size": 8}
    assert document["partition"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert document["fits"] is True
    assert document["problems"] == []
    assert document["seconds_source"] == "measured"
    assert document["memory_limit_bytes"] == 10**9
    assert document["in_flight_microbatches"] == [4, 3, 2, 1]
    names = ["weights", "gradients", "optimizer", "activations", "buffers"]
    assert [list(parts) for parts in document["parts"]] == [names] * 8
    assert [sum(parts.values()) for parts in document["parts"]] == document["peak_memory_bytes"]
    # Ranks 2k and 2k + 1 are replicas of one pipe position.
    assert document["peak_memory_bytes"][0::2] == document["peak_memory_bytes"][1::2]


def test_a_plan_that_does_not_fit_names_rank_part_and_overrides_that_make_it_fit() -> None:
    profile = model([layer(saved_bytes=1000)] * 8)
    overrides: dict[str, Any] = PIPELINE | {"schedule": "gpipe", "data__batch_size": 32}
    plan = planned(profile, **overrides, memory_limit="40kB")
    assert not plan.fits
    (problem,) = plan.problems
    assert problem.path == "memory_limit"
    assert "rank 3 (stage 3) needs" in problem.rule
    assert "the largest part is activations" in problem.why
    proposals = problem.fix.split(" or ")
    assert "schedule=1f1b" in proposals
    assert not any("rotor" in proposal for proposal in proposals)
    assert "schedule.microbatches=16" not in proposals  # gpipe keeps them all: it would not help
    assert len(proposals) >= 3
    for proposal in proposals:
        assert make_plan(typed(request(**overrides, memory_limit="40kB"), proposal), profile).fits, proposal


SOUGHT: list[StageChain] = []
"""The stages for which the slow policy has looked for programs."""


def slow_search(chain: StageChain) -> Iterator[Candidate]:
    SOUGHT.append(chain)
    yield Candidate("slow", (Segment(chain.first, chain.last),))


SLOW = Strategy("slow", FULL.solve, reads_budget=True, candidates=slow_search, chooses=True, searches=True)


OWN: dict[str, Any] = {"activation_checkpoint": "slow", "activation_checkpoint__target": f"{__name__}:SLOW"}


def test_where_a_search_takes_minutes_rotor_is_planned_instead() -> None:
    SOUGHT.clear()
    profile, wanted = model([layer(saved_bytes=1000)] * 8), OWN | {"data__batch_size": 4, "memory_limit": "7kB"}
    problem = make_plan(request(**wanted), profile, suggest=True).problems[0]
    assert len(SOUGHT) == 1
    assert problem.fix == "activation_checkpoint=rotor activation_checkpoint.target=null"
    assert make_plan(typed(request(**wanted), problem.fix), profile).fits


def test_where_rotor_does_not_fit_either_changes_of_it_are_proposed() -> None:
    profile = model([layer(saved_bytes=1000, output_bytes=300, unsaved_forward_bytes=300)] * 8)
    wanted = OWN | PIPELINE | {"schedule": "gpipe", "partition": "uniform", "data__batch_size": 32}
    SOUGHT.clear()
    assert planned(profile, **wanted).fits
    once = len(SOUGHT)
    SOUGHT.clear()
    wanted["memory_limit"] = "14kB"
    fix = str(make_plan(request(**wanted), profile).problems[0].fix)
    assert len(SOUGHT) == once
    proposals = fix.split(" or ")
    assert any("schedule=1f1b" in proposal and len(proposal.split()) > 3 for proposal in proposals)
    for proposal in proposals:
        assert proposal.startswith("activation_checkpoint=rotor activation_checkpoint.target=null ")
        assert make_plan(typed(request(**wanted), proposal), profile).fits, proposal


def test_a_pipeline_is_not_compared_with_one_stage_where_a_search_takes_minutes() -> None:
    SOUGHT.clear()
    plan = make_plan(request(**PIPELINE, **OWN), model([layer()] * 8), suggest=True)
    assert plan.fits
    assert len(SOUGHT) == 4
    assert not any("pipelining" in line for line in plan.advice)


def test_other_precisions_are_proposed_only_where_their_sizes_are_known() -> None:
    profile, half = model([layer(saved_bytes=1000)]), model([layer(saved_bytes=500)])
    config = request(memory_limit="800", data__batch_size=1)
    assert "bf16" not in make_plan(config, profile).problems[0].fix

    def profile_of(changed: RunConfig) -> ModelProfile:
        return half if changed.precision.name == "bf16" else profile

    assert make_plan(config, profile, profile_of=profile_of).problems[0].fix == "precision=bf16"


def test_where_nothing_helps_no_override_is_proposed() -> None:
    problem = planned(model([layer(weight_bytes=10**6)]), memory_limit="1kB").problems[0]
    assert problem.fix == ""
    assert "largest part is weights" in problem.why
    assert "tried makes it fit" in problem.why


def test_pipelining_that_does_not_pay_is_said_with_the_numbers() -> None:
    (line,) = [line for line in planned(**PIPELINE).advice if "pipelining" in line]
    assert line.startswith("pipelining does not pay here: 66 s a step with a bubble of 27%")
    assert "data parallelism over 4 devices 48 s; one device 3 min 12 s" in line
    assert line.endswith("Try parallelism.pipeline=1 parallelism.data=4 schedule.microbatches=1.")


def test_pipelining_that_pays_is_said_too() -> None:
    # Each replica would reduce all weights over a slow link; the pipeline sends small activations.
    profile = model([layer(gradient_bytes=1000, weight_bytes=1000, output_bytes=1)] * 8)
    plan = make_plan(request(**PIPELINE), profile, link=Link(0.0, 100.0))
    (line,) = [line for line in plan.advice if "pipelining" in line]
    assert line.startswith("pipelining pays here: ")
    heavy = planned(profile, **PIPELINE, memory_limit="12kB").advice
    assert any("data parallelism over 4 devices does not fit; one device does not fit" in line for line in heavy)


def test_advice_breaks_no_rule() -> None:
    """DeepSpeed offloads the states of its CPU Adam, not those of 8-bit Adam."""
    tight: dict[str, Any] = {
        "data__batch_size": 1, "memory_limit": "1500", "device": "cuda", "hardware__host_memory_bytes": 10**9,
    }  # fmt: skip
    advised = {name: str(planned(optimizer=name, **tight).problems[0].fix) for name in ("adamw", "adam8bit")}
    assert "offload.optimizer=cpu" in advised["adamw"]
    assert "offload" not in advised["adam8bit"]
    assert "activation_checkpoint=full" in advised["adam8bit"]


def test_an_unknown_link_is_said_and_a_known_one_used() -> None:
    assert any("link's speed is not known" in line for line in planned(**PIPELINE).advice)
    slow = request(**PIPELINE, hardware__link_bytes_per_second=1.0)
    assert make_plan(slow, model([layer()] * 8)).time.step_seconds > planned(**PIPELINE).time.step_seconds


def test_problems_come_all_at_once_and_before_any_plan() -> None:
    config = request(parallelism__pipeline=9, partition="manual", partition__boundaries=[1])
    lines = [problem.line() for problem in plan_problems(config, 8, world_size=4)]
    assert any("makes 9 stages, the model has 8 layers" in line for line in lines)
    assert any("makes 9 ranks, 4 were started" in line for line in lines)
    with pytest.raises(RequestError, match="makes 9 stages"):
        make_plan(config, model([layer()] * 8))
    (unknown,) = plan_problems(request(schedule="1f2b"), 8)
    assert unknown.path == "schedule"
    assert plan_problems(request(**PIPELINE), 8, world_size=4) == []


def test_the_table_shows_stages_parts_and_verdict() -> None:
    text = to_table(planned(**PIPELINE, parallelism__data=2))
    assert "8 ranks (pipeline 4 x data 2): schedule 1f1b, 8 micro-batches" in text
    assert "4 stages, 8 layers in all" in text
    assert ["0", "0-1", "0-1", "25%", "80", "B", "4", "60", "B"] in [line.split() for line in text.splitlines()]
    for column in ("weights", "gradients", "optimizer", "activations", "buffers", "6-7"):
        assert column in text
    assert "\nfits: at most" in text
    assert "bubble 27.3%" in text
    refused = to_table(planned(**PIPELINE, memory_limit="600", partition="uniform"))
    assert "does not fit" in refused
    assert "memory_limit = 600 B: rank 0 (stage 0) needs" in refused


def test_a_thousand_ranks_are_planned_as_one_replica() -> None:
    overrides: dict[str, Any] = {"parallelism__pipeline": 16, "parallelism__data": 64, "data__batch_size": 4096}
    plan = planned(model([layer()] * 260), **overrides, schedule__microbatches=8)
    assert plan.topology.world_size == len(plan.peak_memory_bytes) == 1024
    assert len(plan.memory.parts) == 16
    assert sum(map(len, plan.program.actions)) <= 16 * 8 * 6 + 2 * 16
    table = to_table(plan).splitlines()
    assert len(table) < 100
    assert "15" in [line.split()[0] for line in table if line.split()]  # the last stage is among those shown


def test_planning_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, runner.plan.make, runner.plan.render, runner.plan.time.estimate\n"
        "print(sorted({'torch', 'numpy', 'scipy', 'rich', 'lightning', 'hydra'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_running_statistics_have_no_twins() -> None:
    """Their averages would be those of one direction: refused before a rank starts, and auto keeps to one pipeline."""
    layers = model([layer(name="norm", statistics_bytes=72), *[layer()] * 7])
    with pytest.raises(RequestError) as caught:
        planned(layers, **TWINS)
    assert "must be a schedule of one pipeline, because layer norm keeps running statistics" in str(caught.value)
    assert planned(**TWINS).schedule.name == "chimera"
    asked: dict[str, Any] = {"parallelism__pipeline": 2, "schedule__microbatches": 4, "data__batch_size": 4}
    assert len(planned(layers, schedule="auto", **asked).schedule.placement) == 1


def _zb_auto(layers: ModelProfile, **overrides: Any) -> RunPlan:
    asked: dict[str, Any] = {"parallelism__pipeline": 4, "schedule__microbatches": 6, "data__batch_size": 6}
    return planned(layers, schedule="zb_auto", **asked, **overrides)


def test_zb_auto_follows_the_profiles_seconds_and_cost_where_it_is_set() -> None:
    slow = layer(forward_seconds=1.0, backward_seconds=6.0, input_gradient_seconds=5.0, weight_gradient_seconds=2.0)
    profile = model([layer(), slow, layer(), layer()])
    plan = _zb_auto(profile)
    costs = StageCosts(F=[1] * 4, B=[2, 6, 2, 2], I=[1, 5, 1, 1], W=[1, 2, 1, 1])
    expected = fuse_backwards(registry.build("zb_auto", ranks=4, microbatches=6, costs=costs))
    of_unit_costs = fuse_backwards(registry.build("zb_auto", ranks=4, microbatches=6))
    assert plan.schedule == expected != of_unit_costs
    assert plan.time.step_seconds == pytest.approx(simulate(expected, costs).makespan)
    assert plan.time.step_seconds < simulate(of_unit_costs, costs).makespan
    assert _zb_auto(profile, cost__W=1.5).schedule != expected
    assert _zb_auto(profile, cost__F=2.0, cost__B=4.0, cost__I=2.0, cost__W=2.0).schedule == of_unit_costs


TWINS: dict[str, Any] = PIPELINE | {"schedule__name": "chimera"}


def test_twins_are_planned_with_their_weights_and_their_reduction() -> None:
    """Each rank holds two stages of two layers; their gradients of 80 bytes go round a ring of two ranks."""
    plan = planned(**TWINS)
    assert [parts.weights for parts in plan.rank_parts] == [4 * 40] * 4
    assert plan.topology.holders(0, 0) == (0, 3)
    assert ["0", "0", "and", "3", "0-1"] in [line.split()[:5] for line in to_table(plan).splitlines()]
    slow = make_plan(request(**TWINS), model([layer(output_bytes=0)] * 8), link=Link(0.0, 8.0))
    costs = slow.time.costs
    assert costs.reduce == pytest.approx([2 * 40 / 8] * 4)
    # The first rank ends the backwards of stage 3 at 26 of 30 slots of two seconds, and then sums it beside stage 0's.
    assert slow.time.step_seconds == pytest.approx((26 * 2 + 10) + 10)
