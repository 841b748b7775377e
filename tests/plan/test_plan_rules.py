"""The plan's rules: each has a request that breaks it, and reads a schedule's traits alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_profiles import layer, model

from runner.config.rules.table import OWN
from runner.config.schema import DeviceClassConfig, RunConfig
from runner.plan.make import make_plan, plan_problems
from runner.plan.requested_schedule import executed_schedule
from runner.plan.rules.asked import rules_that_asked
from runner.plan.rules.facts import OrderFacts, RequestFacts
from runner.plan.rules.tables import ORDER_TABLES, PLACE_TABLES, SCHEDULE
from runner.profile import ChangedState, ModelProfile, OddWeight
from runner.schedule.catalogue import registry
from runner.schedule.traits import ScheduleTraits, traits_of
from runner.schedule.values import Action, Op, Schedule


def request(schedule: str = "1f1b", **values: Any) -> RunConfig:
    """A pipeline of four ranks; ``a__b=v`` for ``a.b=v``."""
    config = RunConfig(memory_limit="1GB")
    config.parallelism.pipeline, config.schedule.microbatches, config.schedule.name = 4, 8, schedule
    config.data.batch_size = 8
    for path, value in values.items():
        section, _, key = path.partition("__")
        setattr(getattr(config, section) if key else config, key or section, value)
    return config


ALL: dict[str, Any] = {  # what schedules of several kinds refuse
    "compile": True, "activation_checkpoint__name": "full", "offload__activations": "save_on_cpu", "zero__stage": 2,
    "offload__optimizer": "cpu", "zero__config": "a.json", "optimizer__name": "kfac", "precision__name": "bf16_master",
    "schedule__post_validation": True, "optimizer__refresh_every": 3, "trainer__grad_clip_norm": 1.0,
    "trainer__on_nonfinite": "skip", "trainer__ema_decay": 0.9,
}  # fmt: skip
REQUESTS = [
    request("1f1b", zero__stage=3),
    request("chimera"),
    request(
        "1f1b", trainer__grad_clip_value=1.0, zero__stage=1, compression__name="powersgd",
        approximate_backward__name="fewbit", weight_prediction__name="nesterov", optimizer__name="lamb",
    ),
    *(
        request(name, **ALL)
        for name in ("zb_h1", "chimera", "bpipe", "pipefb", "varuna", "pipefisher", "pipedream_2bw", "ampnet")
    ),
    *(request(name, offload__activations="async") for name in ("varuna", "ampnet")),
    *(
        request(name, offload__activations="realtime")
        for name in ("bpipe", "interleaved_1f1b", "zb_h1", "pipefisher")
    ),
    request("varuna", offload__activations="realtime", schedule__opportunistic=True),
    request("1f1b", **ALL | {"offload__activations": "realtime", "schedule__post_validation": True}),
    *(request(name, offload__weights="granular") for name in ("ampnet", "zb_h1", "varuna", "bpipe", "chimera")),
    request("1f1b", **ALL | {"parallelism__tensor": 2}),
    request("1f1b", **ALL | {"parallelism__tensor": 2, "zero__stage": 1}),
    request("varuna", offload__weights="granular", schedule__opportunistic=True),
    request("varuna", schedule__opportunistic=True, schedule__post_validation=True),
    request("1f1b", offload__activations="superneurons"),
    *(request(name, hardware__devices=[DeviceClassConfig()]) for name in ("chimera", "pipefisher")),
    request("varuna", hardware__devices=[DeviceClassConfig()], schedule__opportunistic=True),
    request("pipefisher", optimizer__name="adamw"),
    request("chimera", optimizer__name="onebit_adam"),
    request("chimera", compression__name="halves", compression__target="halved_sums:KIND"),
    request(
        "1f1b", schedule__shares=[1.0] * 7 + [100.0], offload__activations="save_on_cpu", offload__weights="granular"
    ),
    request("1f1b", partition__name="manual", partition__boundaries=[9]),
    *(
        request(name, partition__migrate={3: [9]}, schedule__opportunistic=name == "varuna" or None)
        for name in ("1f1b", "ampnet", "chimera", "pipefisher", "bpipe", "varuna", "avgpipe")
    ),
    request("pipedream_2bw", precision__name="fp16_mixed"),
    request("pipedream_2bw", weight_prediction__name="adam", weight_prediction__preset="spectrain"),
    request("gpipe", weight_prediction__name="nesterov", optimizer__name="lamb", compile=True, zero__stage=1),
    request("gpipe", weight_prediction__name="nesterov", weight_prediction__gap=0.5, offload__delay_from=3),
    request("gpipe", weight_prediction__name="xgrad", schedule__post_validation=True),
    request("ampnet", weight_prediction__name="adam", weight_prediction__preset="no such"),
    request("ampnet", weight_prediction__preset="xpipe", weight_prediction__gap=1.0),
    request("pipemare", weight_prediction__name="adam", schedule__discrepancy_correction=0.1),
    *(
        request(
            name, **ALL, weight_prediction__name="xgrad", offload__delay_from=3,
            compression__name="halves", compression__target="halved_sums:KIND",
        )
        for name in ("avgpipe", "hetpipe")
    ),
]  # fmt: skip


ODD = (
    OddWeight("block.turns", "complex64", 4, trained=True),
    OddWeight("block.scale", "float64", 4, trained=True),
    OddWeight("block.table", "bfloat16", 4, trained=False),
    OddWeight("block.slots", "float32", 0, trained=False),
)

CHANGED = (ChangedState("block.weight", weight=True, trained=True),)


def facts(config: RunConfig) -> OrderFacts:
    statistics = ("norm",) if config.optimizer.name == "kfac" else ()
    return OrderFacts(
        config, traits_of(executed_schedule(config)), 8, statistics, ODD, ("block.mask",), ("block.mask",), CHANGED
    )


def test_every_rule_between_a_request_and_its_schedule_has_a_request_that_breaks_it() -> None:
    asked = [facts(config) for config in REQUESTS]
    never = [
        (table.title, rule.path, rule.why)
        for table in ORDER_TABLES
        for rule in table.rules
        if not any(list(replace(table, rules=(rule,)).problems(each)) for each in asked)
    ]
    assert never == [], "add a request that breaks it to REQUESTS above"


def test_every_rule_that_needs_no_schedule_has_a_request_that_breaks_it() -> None:
    wrong = request(schedule__microbatches=0, activation_checkpoint__name="manual", activation_checkpoint__layers=["x"])
    asked = RequestFacts(wrong, ("stem", "head"), started=3)
    told = [[problem.path for problem in table.problems(asked)] for table in (SCHEDULE, *PLACE_TABLES)]
    assert told == [["schedule.microbatches"], ["activation_checkpoint.layers"], ["parallelism"]]


def test_a_schedule_that_runs_forwards_again_is_not_taken_back() -> None:
    """What it begins early of the next step are forwards without their recomputations."""
    config = request("varuna", schedule__post_validation=True)
    (problem,) = plan_problems(config, 8)
    assert problem.line() == (
        "schedule.post_validation = true: must be false. varuna runs forwards again before their backwards, and the "
        "forwards of the next step that a rank begins early would not know of it. Try schedule.post_validation=false."
    )
    config.schedule.post_validation = False
    assert plan_problems(config, 8) == []


def test_an_asynchronous_schedule_refuses_what_needs_all_stages_at_one_step() -> None:
    assert plan_problems(request("pipedream_2bw"), 8) == []
    (problem,) = plan_problems(request("pipedream_2bw", trainer__grad_clip_norm=0.5), 8)
    assert problem.line() == (
        "trainer.grad_clip_norm = 0.5: must be null with schedule=pipedream_2bw. Each stage is updated by itself, at a "
        "moment when the other stages are at other steps, so that the gradients of the whole model are never there "
        "together. Try trainer.grad_clip_value=1.0."
    )
    for optimizer in ("kfac", "onebit_adam"):
        (problem, *_) = plan_problems(request("pipedream_2bw", optimizer__name=optimizer), 8)
        assert problem.path == "optimizer"


def test_steps_are_drawn_where_they_run_into_each_other() -> None:
    (problem,) = plan_problems(request("1f1b", schedule__steps=2), 8)
    assert problem.line().startswith("schedule.steps = 2: needs schedule.post_validation=true, or an asynchronous")
    assert plan_problems(request("1f1b", schedule__steps=1), 8) == []
    assert plan_problems(request("zb_h2", schedule__steps=3, schedule__post_validation=True), 8) == []
    assert plan_problems(request("pipedream_2bw", schedule__steps=3), 8) == []


TRAITS = {  # has_copies, several stages per rank, splits_backward, recomputes, moves, is filled
    "gpipe": "", "1f1b": "", "interleaved_1f1b": "several", "zb_h1": "split", "zb_v": "several split",
    "chimera": "copies several", "varuna": "recomputes", "pipefb": "copies several recomputes", "bpipe": "moves",
    "pipefisher": "filled", "pipedream_2bw": "asynchronous", "wpipe": "several asynchronous",
    "ampnet": "asynchronous newest", "avgpipe": "own", "hetpipe": "asynchronous waves",
}  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), TRAITS.items())
def test_the_traits_of_schedules(name: str, expected: str) -> None:
    traits = traits_of(registry.build(name, ranks=4, microbatches=8))
    found = {
        "copies": traits.has_copies,
        "several": not traits.one_stage_per_rank,
        "split": traits.splits_backward,
        "recomputes": traits.recomputes,
        "moves": traits.moves_activations,
        "filled": traits.filling is not None,
        "asynchronous": traits.is_asynchronous,
        "newest": traits.reads_newest,
        "leaves": traits.leaves_its_order,
        "own": traits.own_weights,
        "waves": traits.exchanges_waves,
    }
    assert " ".join(word for word, holds in found.items() if holds) == expected
    assert (traits.name, traits.ranks) == (name, 4)


def test_traits_are_values_of_the_actions() -> None:
    actions = tuple(Action(op, 0, 0) for op in (Op.F, Op.I, Op.W))
    split = Schedule(name="own", actions=(actions,), placement=((0,),), pipeline_of_microbatch=(0,))
    whole = ScheduleTraits(
        name="own", ranks=1, stages=1, has_copies=False, one_stage_per_rank=True, splits_backward=False,
        recomputes=False, moves_activations=False, filling=None, is_asynchronous=False, reads_newest=False,
        leaves_its_order=False, forwards_read_newest=True, own_weights=False, exchanges_waves=False, takes_turns=False,
    )  # fmt: skip
    assert traits_of(split) == replace(whole, splits_backward=True)
    assert traits_of(registry.build("varuna", ranks=2, microbatches=2, opportunistic=True)).leaves_its_order


PROFILE: ModelProfile = model([layer()] * 8)


def asked(config: RunConfig, *named: str) -> list[tuple[str, tuple[str, ...]]]:
    plan = make_plan(config, PROFILE)
    return [(rule.path, rule.read) for rule in rules_that_asked(config, named, plan.schedule, PROFILE)]


def test_the_rules_that_looked_at_what_a_request_names() -> None:
    found = asked(request(compile=True), "compile")
    assert set(found) == {("compile", ("compile",))}  # beside policies that take single tensors, beside ZeRO
    assert len(found) > 1
    assert asked(request(compile=True)) == []
    assert ("data.batch_size", ("zero.stage",)) in asked(request(zero__stage=1, parallelism__data=2), "zero.stage")


def test_a_group_stands_for_its_keys_and_a_trait_for_the_schedules_name() -> None:
    by_group, by_key = asked(request("bpipe"), "schedule"), asked(request("bpipe"), "schedule.name")
    assert ("offload.activations", ("schedule.name",)) in by_group
    assert {path for path, _ in by_key} <= {path for path, _ in by_group}
    assert ("offload.activations", ("schedule.name",)) not in asked(request("1f1b"), "schedule")


def test_a_rule_of_one_key_alone_says_nothing_of_what_goes_together() -> None:
    assert asked(request(), "trainer.max_steps", "seed") == []


def test_a_rule_that_asked_has_the_requests_words() -> None:
    config = request("bpipe")
    rules = rules_that_asked(config, ["schedule"], make_plan(config, PROFILE).schedule, PROFILE)
    (lent,) = [rule for rule in rules if rule.path == "compile"]
    assert lent.line() == (
        "compile: must be false. bpipe sends what autograd saved in a forward to another rank, of layers that run as "
        "they are written"
    )
    assert lent.to_json()["source"] == OWN
