"""The rules of ZeRO's stages, a part of the rows of :mod:`runner.config.rules.zero_table`."""

from __future__ import annotations

from runner.config.rules.table import OWN, Row
from runner.config.rules.zero_facts import CONFIG, STAGE_3, STAGE_12, offloads, shares, updated_in_host
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import OPTIMIZERS, find_optimizer

__all__ = ["SHARING_ROWS"]

_STAGES = (None, 0, 1, 2, 3)
_ELEMENTWISE = tuple(name for name, kind in OPTIMIZERS.items() if kind.elementwise)
_IN_HOST = " or ".join(name for name, kind in OPTIMIZERS.items() if kind.place == "host")

SHARING_ROWS: tuple[Row[RunConfig], ...] = (
    Row(
        "zero.stage",
        lambda c: c.zero.stage not in _STAGES,
        "must be null, 0, 1, 2 or 3",
        "There are no other stages",
        f"{CONFIG}: ZeroStageEnum",
        "zero.stage=1",
    ),
    Row(
        "zero.stage",
        lambda c: c.zero.stage == 3 and c.parallelism.pipeline > 1,
        "must be at most 2 with a pipeline",
        "Before every forward it compares its modules' order with global rank 0's, whose stage has others, and waits",
        "deepspeed/runtime/zero/partitioned_param_coordinator.py: reset_step; deepspeed/runtime/pipe/engine.py",
        "zero.stage=1",
    ),
    Row(
        "zero.bucket_elements",
        lambda c: c.zero.bucket_elements < 1,
        "must be at least 1",
        "Gradients are reduced in buckets of so many",
        f"{CONFIG}: reduce_bucket_size",
        "zero.bucket_elements=5000000",
    ),
    Row(
        "zero.config",
        lambda c: c.zero.config is not None and c.zero.stage is None,
        "belongs to zero.stage=0, 1, 2 or 3",
        "Without it DeepSpeed is not used",
        OWN,
        "zero.stage=1",
    ),
    Row(
        "optimizer.name",
        lambda c: shares(c) and (kind := find_optimizer(c.optimizer)) is not None and kind.compresses,
        "must exchange whole gradients with zero.stage=1, 2 or 3",
        "1-bit optimizers compress the momentum of all weights, which every replica must hold whole",
        "Tang et al. 2021, 1-bit Adam; DeepSpeed's took ZeRO 0 alone, before 0.19.7 dropped it",
        "zero.stage=0",
    ),
    Row(
        "optimizer.name",
        lambda c: shares(c) and ((kind := find_optimizer(c.optimizer)) is None or not kind.elementwise),
        f"must be one of {', '.join(_ELEMENTWISE)} with zero.stage=1, 2 or 3",
        "Flat partitions cut weights anywhere: an update that is not elementwise would see other norms or blocks",
        f"{STAGE_12}: single_partition_of_fp32_groups",
        "optimizer=adamw",
    ),
    Row(
        "optimizer.name",
        lambda c: updated_in_host(c) and not offloads(c),
        f"{_IN_HOST} needs offload.optimizer=cpu",
        "Its states are the host's",
        "deepspeed/ops/adam/cpu_adam.py: CPUAdam param must be 'cpu'",
        "offload.optimizer=cpu",
    ),
    Row(
        "optimizer.name",
        lambda c: offloads(c) and (kind := find_optimizer(c.optimizer)) is not None and kind.place == "device",
        "must be another with offload.optimizer",
        "Its kernels are the device's, and its states would be the host's",
        "deepspeed/ops/adam/fused_adam.py, bitsandbytes/optim/optimizer.py",
        "optimizer=cpu_adam",
    ),
    Row(
        "trainer.grad_clip_value",
        lambda c: shares(c) and c.trainer.grad_clip_value is not None,
        "must be null with zero.stage=1, 2 or 3",
        "ZeRO's step clips by the global norm alone",
        f"{STAGE_12}: unscale_and_clip_grads",
        "trainer.grad_clip_norm=1.0",
    ),
    Row(
        "trainer.ema_decay",
        lambda c: c.zero.stage == 3 and c.trainer.ema_decay is not None,
        "must be null with zero.stage=3",
        "Between steps a rank holds parts of weights, not the weights that are averaged",
        f"{STAGE_3}: _partition_all_parameters",
        "zero.stage=2",
    ),
    Row(
        "activation_checkpoint.name",
        lambda c: c.zero.stage == 3 and c.activation_checkpoint.name != "none",
        "must be none with zero.stage=3",
        "The second forward finds weights gathered or dropped otherwise, and torch compares what it saved",
        f"{STAGE_3}: partitioned weights have no elements; torch.utils.checkpoint compares metadata",
        "zero.stage=2",
    ),
    Row(
        "offload.activations",
        lambda c: c.zero.stage == 3 and c.offload.activations != "none",
        "must be none with zero.stage=3",
        "Its hooks would copy every gathered weight that autograd saves to the host and keep it there",
        OWN,
        "zero.stage=2",
    ),
    Row(
        "compile",
        lambda c: shares(c) and c.compile,
        "must be false with zero.stage=1, 2 or 3",
        "Gradient hooks inside compiled backwards fire in another order on another stream",
        f"{STAGE_12}: IPGBucket, copy_streams (#8061)",
        "compile=false",
    ),
    Row(
        "schedule.post_validation",
        lambda c: shares(c) and c.schedule.post_validation,
        "must be false with zero.stage=1, 2 or 3",
        "An update that may be taken back needs a copy of partitions that DeepSpeed's step has written over",
        f"{STAGE_12}: step",
        "schedule.post_validation=false",
    ),
    Row(
        "data.batch_size",
        lambda c: shares(c) and 0 < c.data.batch_size < c.parallelism.data,
        "must be at least parallelism.data with zero.stage=1, 2 or 3",
        "Every replica takes part in every reduction",
        OWN,
        "data.batch_size=32",
    ),
)
