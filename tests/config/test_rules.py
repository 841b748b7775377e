"""Every rule over the sections: one request that breaks it, and what is said."""

# ruff: noqa: E501 - a row of a table stays in one line

from __future__ import annotations

import functools

import pytest
from quick_config import changed

from runner.config.compose.groups import groups
from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.config.schema import RunConfig
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.strategies import STRATEGIES
from runner.optim.catalogue.registry import COMPRESSORS, OPTIMIZERS


@functools.cache
def _composed(*choices: str) -> RunConfig:
    return resolve(["model=gpt", *choices])


def told(*overrides: str) -> list[str]:
    """What is said of a request; options are composed, keys are set in what was composed."""
    composed = [word for word in overrides if word.partition("=")[0] in groups() or ".target=" in word or "nan" in word]
    keys = [word for word in overrides if word not in composed]
    return [problem.line() for problem in rules(changed(_composed(*composed), *keys))]


BROKEN = [
    ("partition.name=best", "partition.name = best: must be one of auto, uniform, parameters, profile, memory, manual."),
    ("optimizer.name=adamww", f"optimizer.name = adamww: must be one of {', '.join(OPTIMIZERS)}. Try optimizer=adamw."),
    ("lr_scheduler.name=step", "lr_scheduler.name = step: must be one of constant, linear, cosine, warmup_decay."),
    ("precision.name=fp8", "precision.name = fp8: must be one of fp32, fp64, bf16, bf16_master, bf16_mixed, fp16, fp16_mixed, fp4_emulated."),
    ("precision.initial_scale=8", "precision.initial_scale = 8.0: belongs to fp16 and fp16_mixed. The precision fp32 has the range of fp32, so that its loss is not scaled. Try precision=fp16."),
    ("precision=bf16_master precision.growth_interval=7", "precision.growth_interval = 7: belongs to fp16 and fp16_mixed."),
    ("precision=fp16 precision.initial_scale=0", "precision.initial_scale = 0.0: must be a finite number above 0. Try precision.initial_scale=65536."),
    ("precision=fp16 precision.growth_interval=0", "precision.growth_interval = 0: must be at least 1. Try precision.growth_interval=1."),
    ("precision=fp16 precision.growth_factor=0.5", "precision.growth_factor = 0.5: must be a finite number, 1 or above. Try precision.growth_factor=2."),
    ("precision=fp16 precision.backoff_factor=1", "precision.backoff_factor = 1.0: must lie in (0, 1). Try precision.backoff_factor=0.5."),
    ("precision=fp16_mixed precision.minimum_scale=1e9", "precision.minimum_scale = 1000000000.0: must be at most precision.initial_scale. The scale starts at precision.initial_scale = 65536.0. Try precision.minimum_scale=65536.0."),
    ("launcher.name=sge", "launcher.name = sge: must be one of local, slurm."),
    ("logger.name=comet", "logger.name = comet: must be one of tensorboard, csv, wandb, mlflow, none, custom."),
    ("profiler.name=nsys", "profiler.name = nsys: must be one of none, simple, cprofile, pytorch, nvtx."),
    ("device=gpu", "device = gpu: must be one of auto, cpu, cuda."),
    ("seed=-1", "seed = -1: must lie in [0, 2^32). NumPy takes no other seed. Try seed=0."),
    ("memory_limit=8XB", "memory_limit = 8XB: must be a size such as 80GB, 8GiB, 512MB or a number of bytes. Try memory_limit=8GiB."),
    ("memory_limit=14M", "memory_limit = 14M: must be a size such as 80GB, 8GiB, 512MB or a number of bytes. Try memory_limit=14MB."),
    ("memory_limit=0", "memory_limit = 0: must be above 0 bytes. Try memory_limit=8GiB."),
    ("report=mine", "report = mine: must be package.module:function. A colon parts the module from the name."),
    ("model.target=zoo/mine.py:build", "model.target = zoo/mine.py:build: must be package.module:function. A colon parts the module from the name. Try model.target=zoo.mine:build."),
    ("model.target=mine.models.build", "model.target = mine.models.build: must be package.module:function. A colon parts the module from the name. Try model.target=mine.models:build."),
    ("data.target=a-b:c", "data.target = a-b:c: must be package.module:function."),
    ("loss=custom", "loss.target = ???: must be given. The option custom calls your own function. Try loss.target=package.module:function."),
    ("loss=mse loss.target=a:b", "loss.target = a:b: belongs to loss=custom. The loss mse calls no function of yours. Try loss=custom."),
    ("logger=custom logger.target=null", "logger.target = null: must be given."),
    ("logger=csv logger.target=a:b", "logger.target = a:b: belongs to logger=custom. The logger csv calls no function of yours. Try logger=custom."),
    ("data.batch_size=0", "data.batch_size = 0: must be at least 1. Try data.batch_size=1."),
    ("data.workers=-1", "data.workers = -1: must be at least 0. Try data.workers=0."),
    ("parallelism.pipeline=0", "parallelism.pipeline = 0: must be at least 1. Try parallelism.pipeline=1."),
    ("parallelism.data=0", "parallelism.data = 0: must be at least 1. Try parallelism.data=1."),
    ("parallelism.tensor=0", "parallelism.tensor = 0: must be at least 1. Try parallelism.tensor=1."),
    ("schedule.microbatches=0", "schedule.microbatches = 0: must be at least 1. Try schedule.microbatches=1."),
    ("schedule.chunks=0", "schedule.chunks = 0: must be at least 1. Try schedule.chunks=1."),
    ("schedule.steps=0", "schedule.steps = 0: must be at least 1. Try schedule.steps=1."),
    ("schedule.post_validation=true trainer.ema_decay=0.9", "schedule.post_validation = true: does not go with trainer.ema_decay. The average would take in weights that may yet be taken back. Try schedule.post_validation=false."),
    ("partition.boundaries=[1]", "partition.boundaries = [1]: belong to partition=manual. The partition auto finds them itself. Try partition=manual."),
    ("partition=manual parallelism.pipeline=3", "partition.boundaries = null: must be given. A manual partition cuts where you say. Try partition.boundaries=[1,2]."),
    ("partition=manual parallelism.pipeline=3 partition.boundaries=[4,2]", "partition.boundaries = [4, 2]: must grow from entry to entry, from 1 on. Each is the first layer of a stage, and layer 0 starts the first. Try partition.boundaries=[2,4]."),
    ("partition=manual parallelism.pipeline=2 partition.boundaries=[0]", "partition.boundaries = [0]: must grow from entry to entry, from 1 on."),
    ("zero.stage=4", "zero.stage = 4: must be null, 0, 1, 2 or 3."),
    (
        "offload.activations=cpu",
        f"offload.activations = cpu: must be one of {', '.join(('none', 'save_on_cpu', *OFFLOADS))}.",
    ),
    (
        "activation_checkpoint.name=ful",
        f"activation_checkpoint.name = ful: must be one of {', '.join((*STRATEGIES, 'custom'))}. "
        "Try activation_checkpoint=full.",
    ),
    ("compression.name=powersdg", f"compression.name = powersdg: must be one of {', '.join(COMPRESSORS)}. Try compression=powersgd."),
    ("compression=topk compression.density=2 parallelism.data=2", "compression.density = 2.0: must lie above 0 and not above 1. Try compression.density=0.01."),
    ("compression.rank=2", "compression.rank = 2: belongs to compression=powersgd or gradzip. It has no meaning for none. Try compression.rank=null."),
    ("compression=bf16 precision=bf16_master parallelism.data=2", "compression.name = bf16: must be another with precision=bf16_master. Gradients have 16 bits already. Try compression=none."),
    ("optimizer.lr=0", "optimizer.lr = 0.0: must be a finite number above 0. Try optimizer.lr=0.001."),
    ("optimizer.lr=nan", "optimizer.lr = nan: must be a finite number above 0."),
    ("optimizer.eps=-1", "optimizer.eps = -1.0: must be a finite number above 0. Try optimizer.eps=1e-8."),
    ("optimizer.weight_decay=-1", "optimizer.weight_decay = -1.0: must be a finite number, 0 or above. Try optimizer.weight_decay=0."),
    ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: must be two numbers in [0, 1). Try optimizer.betas=[0.9,0.999]."),
    ("optimizer.betas=[0.9,1]", "optimizer.betas = [0.9, 1.0]: must be two numbers in [0, 1)."),
    ("optimizer=sgd optimizer.momentum=1", "optimizer.momentum = 1.0: must lie in [0, 1). Try optimizer.momentum=0.9."),
    ("optimizer.momentum=0.5", "optimizer.momentum = 0.5: belongs to optimizer=kfac, lars, muon or sgd. It has no meaning for adamw. Try optimizer.momentum=0."),
    ("optimizer=sgd optimizer.betas=[0.5,0.5]", "optimizer.betas = [0.5, 0.5]: belongs to Adam and its kin. They have no meaning for sgd. Try optimizer.betas=[0.9,0.999]."),
    ("optimizer=sgd optimizer.eps=1e-6", "optimizer.eps = 1e-06: belongs to Adam and its kin. It has no meaning for sgd. Try optimizer.eps=1e-8."),
    ("lr_scheduler.warmup_steps=5", "lr_scheduler.warmup_steps = 5: belongs to a schedule that changes the rate. The constant schedule keeps optimizer.lr at every step. Try lr_scheduler=linear."),
    ("lr_scheduler.min_lr=1e-5", "lr_scheduler.min_lr = 1e-05: belongs to a schedule that changes the rate."),
    ("lr_scheduler.total_steps=5", "lr_scheduler.total_steps = 5: belongs to a schedule that changes the rate."),
    ("lr_scheduler=linear lr_scheduler.warmup_steps=-1", "lr_scheduler.warmup_steps = -1: must be at least 0. Try lr_scheduler.warmup_steps=0."),
    ("lr_scheduler=linear lr_scheduler.total_steps=0", "lr_scheduler.total_steps = 0: must be at least 1. Try lr_scheduler.total_steps=1."),
    ("lr_scheduler=cosine lr_scheduler.min_lr=-1", "lr_scheduler.min_lr = -1.0: must be a finite number, 0 or above. Try lr_scheduler.min_lr=0."),
    ("lr_scheduler=linear lr_scheduler.warmup_steps=101", "lr_scheduler.warmup_steps = 101: must be at most 100. The decay ends at step 100 (trainer.max_steps). Try lr_scheduler.warmup_steps=100."),
    ("lr_scheduler=linear lr_scheduler.total_steps=7 lr_scheduler.warmup_steps=8", "lr_scheduler.warmup_steps = 8: must be at most 7. The decay ends at step 7 (lr_scheduler.total_steps). Try lr_scheduler.warmup_steps=7."),
    ("lr_scheduler=linear lr_scheduler.min_lr=1", "lr_scheduler.min_lr = 1.0: must be at most optimizer.lr. The rate falls from optimizer.lr = 0.001. Try lr_scheduler.min_lr=0."),
    ("trainer.max_steps=0", "trainer.max_steps = 0: must be at least 1. Try trainer.max_steps=1."),
    ("trainer.val_every=0", "trainer.val_every = 0: must be at least 1. Try trainer.val_every=1."),
    ("trainer.log_every=0", "trainer.log_every = 0: must be at least 1. Try trainer.log_every=1."),
    ("trainer.threads=0", "trainer.threads = 0: must be at least 1. Try trainer.threads=1."),
    ("trainer.grad_clip_norm=0", "trainer.grad_clip_norm = 0.0: must be a finite number above 0. Try trainer.grad_clip_norm=1.0."),
    ("trainer.grad_clip_value=0", "trainer.grad_clip_value = 0.0: must be a finite number above 0. Try trainer.grad_clip_value=1.0."),
    ("trainer.grad_clip_value=1 trainer.grad_clip_norm=2", "trainer.grad_clip_value = 1.0: must be null beside a largest norm. Gradients are clipped by one rule, and trainer.grad_clip_norm = 2.0. Try trainer.grad_clip_value=null."),
    ("trainer.on_nonfinite=ignore", "trainer.on_nonfinite = ignore: must be one of stop, skip."),
    ("trainer.ema_decay=1", "trainer.ema_decay = 1.0: must lie in (0, 1). Try trainer.ema_decay=0.999."),
    ("checkpoint.every=0", "checkpoint.every = 0: must be at least 1. Try checkpoint.every=1."),
    ("checkpoint.keep=0", "checkpoint.keep = 0: must be at least 1. Try checkpoint.keep=1."),
    ("checkpoint.keep_best=-1 trainer.val_every=2", "checkpoint.keep_best = -1: must be at least 0. Try checkpoint.keep_best=0."),
    ("checkpoint.allow_pickle=[mine.Thing]", "checkpoint.allow_pickle = mine.Thing: each must be package.module:name of a class or function. Try checkpoint.allow_pickle=[]."),
    ("checkpoint.allow_pickle=[mine:Thing,os:system]", "checkpoint.allow_pickle = os:system: cannot be allowed. It is of Python's standard library, and eval or os.system do whatever a file wants. Try checkpoint.allow_pickle=[]."),
    ("checkpoint.keep_best=1", "checkpoint.keep_best = 1: must be 0 without trainer.val_every. Checkpoints are compared by the validation at their step, and there is one at the end only. Try trainer.val_every=100."),
    ("hardware.flops.fp32=0", "hardware.flops.fp32 = 0.0: must be a finite number above 0."),
    ("hardware.memory_bytes=0", "hardware.memory_bytes = 0.0: must be a finite number above 0. Try hardware.memory_bytes=8e9."),
    ("hardware.link_bytes_per_second=-1", "hardware.link_bytes_per_second = -1.0: must be a finite number above 0. Try hardware.link_bytes_per_second=1e9."),
    ("transport.delay_seconds=-1", "transport.delay_seconds = -1.0: must be a finite number, 0 or above. Try transport.delay_seconds=0."),
    ("transport.bytes_per_second=0", "transport.bytes_per_second = 0.0: must be a finite number above 0. Try transport.bytes_per_second=1e9."),
    ("hardware.link_latency_seconds=-1", "hardware.link_latency_seconds = -1.0: must be a finite number, 0 or above. Try hardware.link_latency_seconds=0."),
    ("launcher.rendezvous_timeout_seconds=0", "launcher.rendezvous_timeout_seconds = 0.0: must be a finite number above 0. Try launcher.rendezvous_timeout_seconds=60."),
    ("launcher.step_timeout_seconds=0", "launcher.step_timeout_seconds = 0.0: must be a finite number above 0. Try launcher.step_timeout_seconds=600."),
    ("cost.comm=-1", "cost.comm = -1.0: must be a finite number, 0 or above. Try cost.comm=0."),
    ("cost.F=0 cost.B=0", "cost.F = 0: must be above 0 where cost.B is 0. Nothing would take any time. Try cost.F=1."),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "line"), BROKEN)
def test_a_broken_rule_is_told_alone_and_with_its_way_out(overrides: str, line: str) -> None:
    (found,) = told(*overrides.split(" "))
    assert found.startswith(line)


def test_all_broken_rules_are_told_at_once() -> None:
    lines = told("parallelism.tensor=0", "optimizer.lr=0", "zero.stage=4", "data.batch_size=0", "trainer.max_steps=0")
    paths = [line.partition(" ")[0] for line in lines]
    assert paths == ["data.batch_size", "parallelism.tensor", "zero.stage", "optimizer.lr", "trainer.max_steps"]


@pytest.mark.parametrize(
    "overrides",
    [
        "schedule.microbatches=64",  # more than samples: the empty ones keep their actions
        "data.batch_size=1 parallelism.data=2",
        "memory_limit=8GiB",
        "memory_limit=1e9",
        "optimizer=sgd optimizer.momentum=0.9",
        "optimizer.betas=[0,0]",
        "lr_scheduler=warmup_decay lr_scheduler.warmup_steps=100",
        "partition=manual partition.boundaries=[2,3] parallelism.pipeline=3",
        "partition=manual partition.boundaries=[] parallelism.pipeline=1",
        "schedule=dapple schedule.steps=1",
        "schedule=zb_h2 schedule.steps=3 schedule.post_validation=true",
        "model.target=a.b.c:d_e",
    ],
)
def test_what_is_right_breaks_no_rule(overrides: str) -> None:
    assert told(*overrides.split(" ")) == []


def test_every_way_out_of_a_single_mistake_is_a_right_request() -> None:
    for mistake in ("parallelism.tensor=0", "zero.stage=4", "optimizer.lr=-1", "memory_limit=x", "trainer.threads=0"):
        (problem,) = rules(resolve(["model=gpt", mistake]))
        assert rules(resolve(["model=gpt", problem.fix])) == []
