"""The tables of rules: a rule that no request breaks is a rule about nothing, and the docs say what the tables say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.config.rules.sections import CONFIG_TABLES, rules
from runner.config.rules.table import Computed, Row, Table, where
from runner.config.rules.zero_table import ZERO
from runner.config.schema import CallbackConfig, DeviceClassConfig, LinkClassConfig, RunConfig
from runner.errors import Problem
from runner.memory.solve.strategies import OPTIONS, STRATEGIES
from runner.plan.rules.document import DOCUMENTS, all_tables, documented
from runner.schedule.catalogue.registry import OPTIONS as SCHEDULES

ROOT = Path(__file__).resolve().parents[2]


NEGATIVE = [
    "parallelism.pipeline", "parallelism.data", "parallelism.tensor", "data.batch_size", "data.workers",
    "data.check_every", "schedule.microbatches", "schedule.chunks",
    "schedule.twin_check_every", "schedule.steps", "optimizer.lr", "optimizer.eps", "optimizer.weight_decay",
    "optimizer.momentum", "optimizer.variance_refreshes", "lr_scheduler.warmup_steps", "lr_scheduler.total_steps",
    "lr_scheduler.min_lr", "lr_scheduler.base_batch", "trainer.max_steps", "trainer.val_every", "trainer.log_every",
    "trainer.threads", "trainer.grad_clip_norm", "trainer.grad_clip_value", "trainer.ema_decay", "checkpoint.every",
    "checkpoint.keep", "checkpoint.keep_best", "hardware.memory_bytes", "hardware.host_memory_bytes",
    "hardware.link_bytes_per_second", "hardware.memory_bytes_per_second", "hardware.network_bytes_per_second",
    "hardware.host_link_bytes_per_second", "hardware.host_memory_bytes_per_second", "hardware.devices_per_node",
    "hardware.link_latency_seconds", "transport.delay_seconds", "transport.bytes_per_second", "cost.F", "cost.B",
    "cost.I", "cost.W", "cost.comm", "cost.curvature", "cost.inversion", "launcher.rendezvous_timeout_seconds",
    "launcher.step_timeout_seconds", "launcher.watchdog_seconds", "launcher.max_restarts", "seed",
    "launcher.start_timeout_seconds", "launcher.exit_timeout_seconds",
    "launcher.grace_seconds", "checkpoint.timeout_seconds", "checkpoint.every_seconds",
    "trainer.max_epochs",
    "weight_prediction.gap", "compression.start_step", "sweep_most",
]  # fmt: skip
UNKNOWN = [
    "partition.name", "optimizer.name", "lr_scheduler.name", "precision.name", "activation_checkpoint.name",
    "launcher.name", "logger.name", "profiler.name", "device", "sweep_retry", "sweep_on_failure", "memory_limit",
    "report", "sweep_report", "plan_report", "model.target", "data.target", "loss.target", "data.collate",
    "offload.activations", "offload.weights", "trainer.on_nonfinite", "compression.name", "weight_prediction.name",
    "approximate_backward.name", "kernels.name", "adapter.name", "embedding.name",
]  # fmt: skip
OF_SLURM = {
    "nodes": 2, "gpus_per_node": 1, "cpus_per_task": 1, "time_limit": "1:00", "signal_seconds": 1, "requeue": False,
    "partition": "a", "account": "a", "sbatch": ["--x"], "wait": True, "dry_run": True, "setup": ["a"], "prefix": "a",
}  # fmt: skip
SCALING = ("initial_scale", "growth_interval", "growth_factor", "backoff_factor", "minimum_scale")
WRONG: dict[Any, Any] = {
    bool: True,
    int: -1,
    float: -1.0,
    str: "no such",
    list[str]: [],
}  # of a guest's option, by its type
COMBINED: list[dict[str, Any]] = [
    {"callbacks": {"mine": CallbackConfig()}}, {"resume": ""},
    {"metrics": {"loss": "a:b", "my-own": "a:b", "accuracy": "a"}},
    {"profiler.name": "nvtx", "device": "cpu"},
    {"memory_limit": "0"}, {"report": "???", "sweep_report": "???", "plan_report": "???"},
    {"model.target": "???", "data.target": "???", "loss.target": "???", "data.collate": "???"},
    {"data.goes_with": {"loss": "token_cross_entropy"}, "loss.name": "mse"},
    {"logger.name": "custom", "logger.target": "a"}, {"logger.name": "custom"}, {"logger.target": "a:b"},
    {"logger.name": "none", "logger.others": ["none"]},
    *({"parallelism.tensor": 2} | other for other in (
        {"optimizer.name": "kfac"}, {"parallelism.scatter_boundaries": True},
        {"compression.name": "mine", "compression.target": "a:b"},
        {"embedding.name": "tensor_train"}, {"approximate_backward.name": "fewbit"}, {"precision.name": "fp4_emulated"},
        {"activation_checkpoint.name": "dtr"}, {"schedule.opportunistic": True},
        {"compile": True},
    )),
    *({"precision.name": "fp64"} | other for other in (
        {"zero.stage": 1}, {"compression.name": "fp16"}, {"optimizer.name": "adam8bit"}, {"trainer.ema_decay": 0.9},
        {"approximate_backward.name": "fewbit"},
    )),
    {"parallelism.name": "auto", "parallelism.ranks": 0, "parallelism.search": "long"}, {"parallelism.ranks": 4},
    {"parallelism.free": ["pipeline"]},
    {"parallelism.name": "auto", "parallelism.free": ["pipeline"], "planner.name": "dapple"},
    {"parallelism.name": "auto", "parallelism.free": ["depth"]},
    {"planner.name": "dapple"}, {"planner.name": "nobody"}, {"transport.emulate_links": True},
    {"planner.form": "repository"}, {"planner.form": "uniform"}, {"planner.name": "pipedream", "planner.form": "sum"},
    {"kernels.attention": "liger"}, {"kernels.attention": "fused", "compile": True},
    {"kernels.norm": "quick"}, {"kernels.elementwise": "quick"}, {"kernels.loss": "quick"},
    {"kernels.norm": "fused", "precision.name": "bf16_mixed"},
    {"kernels.norm": "fused", "approximate_backward.name": "fewbit"},
    {"kernels.substitutions": ["merge_linear"]}, {"kernels.substitutions": ["one_hot"], "zero.stage": 3},
    {"kernels.elementwise": "fused", "optimizer.name": "kfac"}, {"kernels.loss": "fused", "zero.stage": 3},
    {"parallelism.sequence": True}, {"parallelism.sharding": {"a": "row"}}, {"parallelism.scatter_boundaries": True},
    {"parallelism.loss": "gathered"}, {"parallelism.tensor_sums": "native"}, {"parallelism.order": "pipeline_inside"},
    {"parallelism.tensor": 2, "parallelism.loss": "whole", "parallelism.tensor_sums": "fast"},
    {"parallelism.order": "tensor_inside"}, {"parallelism.batch_sliced": ["features"]},
    {"parallelism.tensor": 2, "parallelism.batch_sliced": ["features"], "parallelism.sequence": True},
    {"lr_scheduler.target": "a"}, {"lr_scheduler.target": "???"}, {"lr_scheduler.kwargs": {"a": 1}},
    {"lr_scheduler.name": "cosine", "lr_scheduler.target": "a:b"},
    {"lr_scheduler.name": "mine", "lr_scheduler.target": "a:b", "lr_scheduler.warmup_steps": 2},
    {"lr_scheduler.name": "mine", "lr_scheduler.target": "a:b", "lr_scheduler.min_lr": 1.0},
    {"planner.target": "a"}, {"planner.target": "???"}, {"planner.kwargs": {"a": 1}},
    {"planner.name": "dapple", "planner.target": "a:b"},
    {"schedule.post_validation": True, "trainer.ema_decay": 0.9},
    {"partition.boundaries": [1]},
    {"partition.name": "manual"}, {"partition.name": "manual", "partition.boundaries": [2, 1]},
    {
        "partition.migrate": {0: [2, 1]}, "parallelism.name": "auto", "parallelism.tensor": 2, "zero.stage": 1,
        "offload.activations": "async", "offload.weights": "l2l", "offload.delay_from": 1, "compile": True,
        "compression.name": "powersgd", "schedule.post_validation": True, "approximate_backward.name": "both",
        "trainer.max_epochs": 1, "hardware.devices": [DeviceClassConfig()], "optimizer.name": "kfac",
    },
    *({"activation_checkpoint.name": name} for name in (*STRATEGIES, "custom")),
    *(
        {f"{section}.{key}": WRONG[next(iter(each.values())).kind]}
        for section, options in (("activation_checkpoint", OPTIONS), ("schedule", SCHEDULES))
        for key, each in options.items()
        if next(iter(each.values())).kind in WRONG
    ),
    {"activation_checkpoint.target": "a"}, {"activation_checkpoint.kwargs": {"a": 1}},
    {"activation_checkpoint.name": "full", "activation_checkpoint.target": "a:b"},
    {"activation_checkpoint.name": "selective", "offload.activations": "save_on_cpu", "compile": True},
    {"activation_checkpoint.name": "kusumoto", "offload.activations": "save_on_cpu", "compile": True},
    {"activation_checkpoint.name": "rotor", "offload.activations": "greedy", "compile": True},
    {"activation_checkpoint.name": "full", "offload.activations": "pofo"},
    {"precision.name": "bf16_mixed", "offload.activations": "async"},
    {"offload.weights": "l2l", "zero.stage": 1, "compile": True, "offload.activations": "async", "parallelism.data": 2},
    {"offload.weights": "l2l", "precision.name": "fp16_mixed", "schedule.post_validation": True},
    {"offload.weights": "granular", "precision.name": "bf16_master", "offload.fraction": 2.0},
    {"offload.weights": "granular", "activation_checkpoint.name": "rotor", "weight_prediction.name": "adam"},
    {"offload.weights": "blockswap", "optimizer.name": "kfac"}, {"offload.weights": "blockswap", "offload.blocks": 0},
    {"offload.blocks": 1, "offload.fraction": 0.5, "offload.frozen_only": True, "offload.drive": "a"},
    {"offload.scope": "some"}, {"offload.scope": "all"}, {"offload.scope": "weights"},
    {"offload.scope": "weights", "offload.activations": "vdnn_all"},
    {"offload.scope": "all", "offload.activations": "greedy", "offload.weights": "granular"},
    {"offload.delay_seconds": 0.1, "offload.bytes_per_second": 1e6},
    {"offload.delay_seconds": -0.1, "offload.bytes_per_second": -1.0},
    {"zero.stage": 1, "zero.config": "nowhere.json"}, {"optimizer.betas": [1.0]},
    {"optimizer.momentum": 0.5, "optimizer.freeze_step": 1, "optimizer.variance_refreshes": 1},
    {"optimizer.damping": 1.0},
    {"optimizer.name": "sgd", "optimizer.betas": [0.5, 0.5], "optimizer.eps": 1.0},
    {"optimizer.name": "adam8bit", "optimizer.decoupled_weight_decay": True},
    {"optimizer.name": "adam8bit", "optimizer.decoupled_weight_decay": False},
    {"optimizer.name": "sgd", "optimizer.decoupled_weight_decay": True},
    {"optimizer.name": "adamw", "optimizer.decoupled_weight_decay": False}, {"optimizer.name": "onebit_adam"},
    {"optimizer.name": "onebit_lamb", "optimizer.freeze_step": 1},
    {"optimizer.name": "onebit_adam", "optimizer.freeze_step": 0, "schedule.post_validation": True},
    {"optimizer.name": "onebit_adam", "trainer.grad_clip_norm": 1.0, "trainer.grad_clip_value": 1.0},
    {"optimizer.name": "onebit_adam_refreshed"}, {"optimizer.name": "kfac"}, {"optimizer.refresh_every": 1},
    {
        "optimizer.name": "kfac", "optimizer.damping": 0.0, "optimizer.refresh_every": 0, "parallelism.data": 2,
        "zero.stage": 1, "precision.name": "bf16", "compile": True, "activation_checkpoint.name": "full",
        "offload.activations": "save_on_cpu", "schedule.post_validation": True,
    },
    {"optimizer.target": "a:b", "optimizer.kwargs": {"a": 1}},
    {"optimizer.name": "custom", "optimizer.weight_decay": 0.1},
    {"optimizer.name": "onebit_adam_refreshed", "optimizer.variance_refreshes": 0}, {"compression.target": "a:b"},
    {"optimizer.name": "mine", "optimizer.target": "halved_sums:STRICT_OPTIMIZER", "trainer.threads": 2},
    {
        "compression.name": "halves", "compression.target": "halved_sums:STRICT", "compression.kwargs": {"kep": 1},
        "zero.stage": 1, "optimizer.name": "onebit_adam", "precision.name": "fp16", "trainer.threads": 2,
    },
    {"compression.name": "halves", "compression.target": "halved_sums:KIND", "compression.kwargs": {"keep": 7}},
    {"approximate_backward.bits": 3, "approximate_backward.ratio": 0.5}, {"approximate_backward.name": "both"},
    {"approximate_backward.name": "both", "approximate_backward.bits": 5, "approximate_backward.ratio": 1.0},
    {"approximate_backward.name": "both", "compile": True, "optimizer.name": "kfac", "precision.name": "fp4_emulated"},
    {"compression.density": 0.1, "compression.levels": 1, "compression.rank": 1, "compression.error_feedback": True},
    {"compression.name": "topk", "compression.density": 0.0}, {"compression.name": "topk"},
    {"compression.name": "qsgd", "compression.levels": 0}, {"compression.name": "qsgd"},
    {"compression.name": "gradzip", "compression.rank": 0}, {"compression.name": "gradzip"},
    {"compression.start_step": 1}, {"compression.name": "fp16", "precision.name": "bf16"},
    {"lr_scheduler.warmup_steps": 1, "lr_scheduler.min_lr": 0.1, "lr_scheduler.total_steps": 1},
    {"lr_scheduler.name": "linear", "lr_scheduler.warmup_steps": 9, "lr_scheduler.total_steps": 5},
    {"lr_scheduler.name": "linear", "lr_scheduler.warmup_steps": 999},
    {"lr_scheduler.name": "linear", "lr_scheduler.min_lr": 1.0}, {f"precision.{key}": 7 for key in SCALING},
    {"precision.name": "fp16"} | {f"precision.{key}": -1 for key in SCALING},
    {"precision.name": "fp16", "precision.minimum_scale": 9e9},
    {"checkpoint.keep_best": 1}, {"checkpoint.allow_pickle": ["os:system"]}, {"hardware.flops": {"fp32": 0.0}},
    {"hardware.links": [LinkClassConfig()]},
    {"parallelism.devices": ["slow"]},
    *({"hardware.devices": [DeviceClassConfig()], "parallelism.devices": ["slow"]} | other for other in (
        {"parallelism.name": "auto"}, {"parallelism.tensor": 2}, {"partition.name": "memory"}, {"zero.stage": 1},
        {"offload.optimizer": "cpu", "offload.parameters": "cpu"}, {"launcher.name": "slurm"},
        {"offload.activations": "save_on_cpu", "offload.weights": "l2l"},
    )),
    {"hardware.memory_bytes": 0.5, "hardware.host_memory_bytes": 0.5}, {"cost.F": 0.0, "cost.B": 0.0},
    {f"launcher.{key}": value for key, value in OF_SLURM.items()}, {"launcher.name": "slurm", "launcher.nodes": 2},
    {
        "launcher.name": "slurm", "launcher.nodes": 0, "launcher.gpus_per_node": -1, "launcher.cpus_per_task": 0,
        "launcher.signal_seconds": 0, "launcher.time_limit": "soon", "launcher.partition": "a b",
        "launcher.account": "", "launcher.sbatch": ["x"], "launcher.grace_seconds": 1.0, "launcher.setup": [" "],
        "launcher.prefix": "'", "run_dir": "a\nb",
    },
    {"launcher.name": "slurm", "launcher.gpus_per_node": 1, "parallelism.data": 2},
    {"weight_prediction.preset": "xpipe", "weight_prediction.gap": 1.0},
    {"weight_prediction.name": "momentum", "weight_prediction.target": "nowhere:ahead"},
    {"weight_prediction.kwargs": {"share": 1}, "offload.kwargs": {"share": 1}},
    {"offload.activations": "all", "offload.kwargs": {"share": 1}}, {"schedule.kwargs": {"a": 1}},
    {"schedule.name": "gpipe", "schedule.target": "a:b"},
    {"offload.target": "nowhere:moves"}, {"offload.target": "nowhere:moves", "offload.activations": "mine"},
    {"model.pretrained_strict": False, "model.pretrained_names": "names.yaml"},
    {"adapter.rank": 4, "adapter.alpha": 8.0, "adapter.dropout": 0.1, "adapter.targets": ["q_proj"]},
    {"adapter.name": "lora", "adapter.rank": 0, "adapter.alpha": 0.0, "adapter.dropout": 1.0},
    {"embedding.rank": 4, "embedding.factors": 2, "embedding.targets": ["tokens"]},
    {
        "embedding.name": "tensor_train", "embedding.rank": 0, "embedding.factors": 1, "model.pretrained": "x",
        "adapter.name": "lora",
    },
]  # fmt: skip
BROKEN: list[dict[str, Any]] = [*({key: -1} for key in NEGATIVE), *({key: "no such"} for key in UNKNOWN), *COMBINED]


def request(values: Mapping[str, Any]) -> RunConfig:
    config = RunConfig()
    for path, value in values.items():
        *sections, key = path.split(".")
        place: Any = config
        for section in sections:
            place = getattr(place, section)
        setattr(place, key, value)
    return config


def test_every_rule_has_a_request_that_breaks_it() -> None:
    requests = [request(values) for values in BROKEN]
    tables = [table for table in CONFIG_TABLES if table is not ZERO]  # tests/zero has ZeRO's
    never = [
        (table.title, rule.path, rule.rule)
        for table in tables
        for rule in table.rules
        if not any(list(replace(table, rules=(rule,)).problems(config)) for config in requests)
    ]
    assert never == [], "add a request that breaks it to COMBINED above"


def test_every_problem_is_a_rules() -> None:
    """What is told is what the table says, with the request's values in its words."""
    for values in BROKEN:
        config = request(values)
        told = [problem.path for problem in rules(config)]
        known = {rule.path for table in CONFIG_TABLES for rule in table.rules}
        assert all(
            path in known
            or path.startswith(("hardware.flops.", "hardware.links[", "hardware.devices[", "nowhere.json"))
            or path.startswith(("compression.kwargs.", "metrics.", "callbacks."))
            for path in told
        ), values


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_documents_tables_are_the_tables(document: str) -> None:
    """``python -m runner.plan.rules.document --write`` writes them."""
    text = (ROOT / document).read_text(encoding="utf-8")
    assert documented(document, text) == text


def test_a_document_without_a_place_for_its_table_is_told() -> None:
    with pytest.raises(ValueError, match=r"docs/zero\.md must have"):
        documented("docs/zero.md", "no table here")


def test_every_rule_says_what_must_hold_and_stands_in_a_group_with_a_name() -> None:
    tables = all_tables()
    assert len({table.title for table in tables}) == len(tables)
    assert all(rule.path and rule.rule and not rule.rule.endswith(".") for table in tables for rule in table.rules)


def test_words_name_facts() -> None:
    row: Row[RunConfig] = Row(
        "compile",
        lambda c: c.compile,
        "must be false with {schedule.name}",
        "zero.stage is {zero.stage}, compile {compile}",
        fix="trainer.max_steps={trainer.max_steps}",
    )
    assert list(row.problems(RunConfig())) == []
    assert list(row.problems(RunConfig(compile=True))) == [
        Problem("compile", True, "must be false with 1f1b", "zero.stage is null, compile true", "trainer.max_steps=100")
    ]


def test_a_sections_value_is_its_options_name() -> None:
    row: Row[RunConfig] = Row("activation_checkpoint", lambda c: True, "must be another")
    assert [problem.value for problem in row.problems(RunConfig())] == ["none"]


def test_an_argument_of_a_guest_is_named_as_a_key_is() -> None:
    row: Row[RunConfig] = Row("compression.kwargs.every", lambda c: c.compression.kwargs.get("every") != 4, "must be 4")
    given = request({"compression.kwargs": {"every": 0}})
    assert [problem.value for each in (RunConfig(), given) for problem in row.problems(each)] == [None, 0]


def test_a_condition_holds_for_a_whole_table_or_for_some_of_its_rows() -> None:
    rows: tuple[Row[RunConfig], ...] = (
        Row("seed", lambda c: True, "first", "why", "a file"),
        Row("seed", lambda c: True, "second", "why", "a file"),
        *where(lambda c: c.compile, Row("device", lambda c: c.device == "auto", "third")),
    )

    def told(table: Table[RunConfig], config: RunConfig) -> list[str]:
        return [f"{problem.rule} {problem.why}".strip() for problem in table.problems(config)]

    assert told(Table("all", rows), RunConfig()) == ["first why", "second why"]
    assert told(Table("all", rows), RunConfig(compile=True)) == ["first why", "second why", "third"]
    assert told(Table("one", rows, first_of_each_key=True, cites=True), RunConfig()) == ["first why (a file)"]
    assert told(Table("none", rows, applies=lambda c: c.compile), RunConfig()) == []


def test_conditions_add_up() -> None:
    row: Row[RunConfig] = Row("seed", lambda c: True, "never", when=lambda c: c.compile)
    (both,) = where(lambda c: c.device == "cpu", row)
    found = [
        list(both.problems(RunConfig(compile=on, device=device))) for on in (False, True) for device in ("cpu", "cuda")
    ]
    assert [len(problems) for problems in found] == [0, 0, 1, 0]


def test_a_rule_that_computes_may_tell_several_problems() -> None:
    def find(config: RunConfig) -> list[Problem]:
        return [Problem("seed", number, "is wrong") for number in (1, 2)]

    table = Table[RunConfig]("computed", (Computed("seed", find, "must be right"),), first_of_each_key=True)
    assert [problem.value for problem in table.problems(RunConfig())] == [1, 2]
