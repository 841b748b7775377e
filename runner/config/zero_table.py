"""What ZeRO and its offload cannot be combined with: one row per rule, with whose rule it is.

The table is data: it is checked before a launch, printed by ``runner plan --why`` and drawn in docs/zero.md. Sources
are files of DeepSpeed 0.19.8 where the rule is DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from runner.config.optimizers import OPTIMIZERS
from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.errors import Problem

__all__ = ["ROWS", "Row", "compatibility_lines", "zero_rules"]

_STAGES = (None, 0, 1, 2, 3)
_PLACES = ("none", "cpu", "nvme")
_ELEMENTWISE = tuple(name for name, kind in OPTIMIZERS.items() if kind.elementwise)
_OWN = "the runner"
_STAGE_12, _STAGE_3 = "deepspeed/runtime/zero/stage_1_and_2.py", "deepspeed/runtime/zero/stage3.py"
_OFFLOAD = "deepspeed/runtime/zero/offload_config.py"
_CONFIG = "deepspeed/runtime/zero/config.py"


@dataclass(frozen=True, slots=True)
class Row:
    """One rule.

    Args:
        path: the key that is refused.
        breaks: whether a request breaks the rule.
        rule: what must hold.
        why: the reason.
        source: where it stands.
        fix: an override that would do.
    """

    path: str
    breaks: Callable[[RunConfig], bool]
    rule: str
    why: str
    source: str
    fix: str

    def problem(self, config: RunConfig) -> Problem:
        return Problem(self.path, _value(config, self.path), self.rule, f"{self.why} ({self.source})", self.fix)


def zero_rules(config: RunConfig) -> Iterator[Problem]:
    """Every row that the request breaks; of several with one key the first."""
    told: set[str] = set()
    for row in ROWS:
        if row.path not in told and row.breaks(config):
            told.add(row.path)
            yield row.problem(config)


def compatibility_lines(config: RunConfig) -> list[str]:
    """The table in words, each row with whether the request keeps it."""
    broken = {id(row) for row in ROWS if row.breaks(config)}
    marks = ("BROKEN" if id(row) in broken else "kept  " for row in ROWS)
    return [f"{mark}  {row.path}: {row.rule}. {row.why} ({row.source})" for mark, row in zip(marks, ROWS, strict=True)]


def _value(config: RunConfig, path: str) -> object:
    value: object = config
    for key in path.split("."):
        value = getattr(value, key)
    return value


def _shares(config: RunConfig) -> bool:
    return bool(config.zero.stage)


def _offloads(config: RunConfig) -> bool:
    return config.offload.optimizer != "none"


def _pure_16_bit(config: RunConfig) -> bool:
    precision = PRECISIONS.get(config.precision.name)
    return precision is not None and precision.weights != "float32" and not precision.master_weights


ROWS: tuple[Row, ...] = (
    Row(
        "zero.stage",
        lambda c: c.zero.stage not in _STAGES,
        "must be null, 0, 1, 2 or 3",
        "There are no other stages",
        f"{_CONFIG}: ZeroStageEnum",
        "zero.stage=1",
    ),
    Row(
        "zero.stage",
        lambda c: c.zero.stage == 3 and c.parallelism.pipeline > 1,
        "must be at most 2 with a pipeline",
        "It gathers and drops weights around every micro-batch, and a stage has several in flight",
        "deepspeed/runtime/pipe/engine.py: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
        "zero.stage=1",
    ),
    Row(
        "zero.bucket_elements",
        lambda c: c.zero.bucket_elements < 1,
        "must be at least 1",
        "Gradients are reduced in buckets of so many",
        f"{_CONFIG}: reduce_bucket_size",
        "zero.bucket_elements=5000000",
    ),
    Row(
        "zero.config",
        lambda c: c.zero.config is not None and c.zero.stage is None,
        "belongs to zero.stage=0, 1, 2 or 3",
        "Without it DeepSpeed is not used",
        _OWN,
        "zero.stage=1",
    ),
    Row(
        "offload.optimizer",
        lambda c: c.offload.optimizer not in _PLACES,
        "must be one of none, cpu, nvme",
        "There are no other places",
        f"{_OFFLOAD}: OffloadDeviceEnum",
        "offload.optimizer=cpu",
    ),
    Row(
        "offload.optimizer",
        lambda c: _offloads(c) and not c.zero.stage,
        "belongs to zero.stage=1, 2 or 3",
        "What moves the states is ZeRO's optimizer; one device may use it, too",
        f"{_OFFLOAD}: DeepSpeedZeroOffloadOptimizerConfig, valid with stage 1, 2, and 3",
        "zero.stage=2",
    ),
    Row(
        "offload.optimizer",
        lambda c: c.offload.optimizer == "nvme" and c.zero.stage != 3,
        "nvme belongs to zero.stage=3",
        "Stages 1 and 2 have no swapper: they take nvme for cpu without a word",
        f"{_STAGE_12}: cpu_offload is any device but none",
        "zero.stage=3",
    ),
    Row(
        "offload.optimizer",
        lambda c: _offloads(c) and _pure_16_bit(c) and c.optimizer.name != "cpu_adam",
        "needs fp32 states: precision=fp32, bf16_mixed, bf16_master or fp16; or optimizer=cpu_adam",
        "16-bit states leave the device with DeepSpeedCPUAdam alone, which is not the optimizer you named",
        "deepspeed/runtime/base_optimizer.py: _configure_master_weights",
        "optimizer=cpu_adam",
    ),
    Row(
        "offload.parameters",
        lambda c: c.offload.parameters not in _PLACES,
        "must be one of none, cpu, nvme",
        "There are no other places",
        f"{_OFFLOAD}: OffloadDeviceEnum",
        "offload.parameters=cpu",
    ),
    Row(
        "offload.parameters",
        lambda c: c.offload.parameters != "none" and c.zero.stage != 3,
        "belongs to zero.stage=3",
        "The other stages keep all weights on every device",
        f"{_OFFLOAD}: DeepSpeedZeroOffloadParamConfig, valid only with stage 3",
        "zero.stage=3",
    ),
    Row(
        "offload.ratio",
        lambda c: not 0 < c.offload.ratio <= 1,
        "must lie in (0, 1]",
        "It is the part of the states that leaves the device",
        f"{_OFFLOAD}: ratio",
        "offload.ratio=1.0",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and not _offloads(c),
        "belongs to offload.optimizer=cpu",
        "Nothing leaves the device",
        f"{_OFFLOAD}: ratio",
        "offload.ratio=1.0",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and c.zero.stage != 3,
        "must be 1 with zero.stage=1 and 2",
        "Partial offloading is only supported for ZeRO stage 3",
        f"{_CONFIG}: offload_ratio_check",
        "zero.stage=3",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and c.offload.optimizer == "nvme",
        "must be 1 with offload.optimizer=nvme",
        "Swapped states have no part that stays",
        f"{_OFFLOAD}: ratio is of the states offloaded to CPU Adam",
        "offload.ratio=1.0",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and c.optimizer.name != "cpu_adam",
        "must be 1 but with optimizer=cpu_adam",
        "The twin flow's hybrid optimizer takes DeepSpeedCPUAdam only, which is not the optimizer you named",
        f"{_STAGE_3}: Hybrid Optimizer Only Supports DeepSpeedCPUAdam",
        "optimizer=cpu_adam",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and c.optimizer.decoupled_weight_decay is False,
        "must be 1 with optimizer.decoupled_weight_decay=false",
        "What stays on the device is updated by torch's AdamW, whose weight decay is decoupled",
        f"{_STAGE_3}: backup_optimizer",
        "optimizer.decoupled_weight_decay=true",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and c.offload.delay_from is not None,
        "must be 1 with offload.delay_from",
        "What is delayed wraps the host's optimizer, and the hybrid one takes none that is wrapped",
        f"{_STAGE_3}: Hybrid Optimizer Only Supports DeepSpeedCPUAdam",
        "offload.delay_from=null",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and c.offload.parameters == "nvme",
        "must be 1 with offload.parameters=nvme",
        "Weights that come from a drive get the partition that is updated in the host's memory, whatever the ratio",
        f"{_STAGE_3}: _create_fp32_partitions, params_in_nvme_and_cpu",
        "offload.parameters=cpu",
    ),
    Row(
        "offload.nvme_path",
        lambda c: "nvme" in (c.offload.optimizer, c.offload.parameters) and not c.offload.nvme_path,
        "must name a folder on the drive",
        "States and weights are swapped to files in it",
        f"{_STAGE_3}: _configure_tensor_swapping",
        "offload.nvme_path=/local_nvme",
    ),
    Row(
        "offload.nvme_path",
        lambda c: "nvme" not in (c.offload.optimizer, c.offload.parameters) and c.offload.nvme_path is not None,
        "belongs to offload.optimizer=nvme",
        "Nothing is swapped to it",
        _OWN,
        "offload.nvme_path=null",
    ),
    Row(
        "offload.delay_from",
        lambda c: c.offload.delay_from is not None and c.offload.optimizer != "cpu",
        "belongs to offload.optimizer=cpu",
        "What is delayed is the host's update",
        "Ren et al. 2021, ZeRO-Offload, section 5.2",
        "offload.optimizer=cpu",
    ),
    Row(
        "offload.delay_from",
        lambda c: c.offload.delay_from is not None and _pure_16_bit(c),
        "needs fp32 states: precision=fp32, bf16_mixed, bf16_master or fp16",
        "16-bit states leave the device with DeepSpeedCPUAdam itself, not with an optimizer that delays it",
        "deepspeed/runtime/base_optimizer.py: _configure_master_weights",
        "precision=bf16_master",
    ),
    Row(
        "offload.delay_from",
        lambda c: c.offload.delay_from is not None and c.offload.delay_from < 1,
        "must be at least 1",
        "ZeRO's optimizer looks for its states after the first update",
        f"{_STAGE_12}: _lazy_init_hp_params_optimizer_state",
        "offload.delay_from=1",
    ),
    Row(
        "resume",
        lambda c: c.resume is not None and c.offload.delay_from is not None,
        "must be null with offload.delay_from",
        "A checkpoint does not hold the update that is under way",
        _OWN,
        "offload.delay_from=null",
    ),
    Row(
        "resume",
        lambda c: c.resume is not None and "nvme" in (c.offload.optimizer, c.offload.parameters),
        "must be null with offload to nvme",
        "Swapped states cannot be put back into their files from a whole checkpoint",
        f"{_STAGE_3}: set_local_hp_param leaves other keys in the swap file",
        "offload.optimizer=cpu",
    ),
    Row(
        "optimizer.name",
        lambda c: _shares(c) and c.optimizer.name in OPTIMIZERS and OPTIMIZERS[c.optimizer.name].compresses,
        "must exchange whole gradients with zero.stage=1, 2 or 3",
        "1-bit optimizers compress the momentum of all weights, which every replica must hold whole",
        "Tang et al. 2021, 1-bit Adam; DeepSpeed's took ZeRO 0 alone, before 0.19.7 dropped it",
        "zero.stage=0",
    ),
    Row(
        "optimizer.name",
        lambda c: _shares(c) and c.optimizer.name not in _ELEMENTWISE,
        f"must be one of {', '.join(_ELEMENTWISE)} with zero.stage=1, 2 or 3",
        "Flat partitions cut weights anywhere: an update that is not elementwise would see other norms",
        f"{_STAGE_12}: single_partition_of_fp32_groups",
        "optimizer=adamw",
    ),
    Row(
        "optimizer.name",
        lambda c: c.optimizer.name == "cpu_adam" and not _offloads(c),
        "cpu_adam needs offload.optimizer=cpu",
        "Its states are the host's",
        "deepspeed/ops/adam/cpu_adam.py: CPUAdam param must be 'cpu'",
        "offload.optimizer=cpu",
    ),
    Row(
        "optimizer.name",
        lambda c: _offloads(c) and c.optimizer.name in ("adam8bit", "fused_adam"),
        "must be another with offload.optimizer",
        "Its kernels are the device's, and its states would be the host's",
        "deepspeed/ops/adam/fused_adam.py, bitsandbytes/optim/optimizer.py",
        "optimizer=cpu_adam",
    ),
    Row(
        "trainer.grad_clip_value",
        lambda c: _shares(c) and c.trainer.grad_clip_value is not None,
        "must be null with zero.stage=1, 2 or 3",
        "ZeRO's step clips by the global norm alone",
        f"{_STAGE_12}: unscale_and_clip_grads",
        "trainer.grad_clip_norm=1.0",
    ),
    Row(
        "trainer.ema_decay",
        lambda c: c.zero.stage == 3 and c.trainer.ema_decay is not None,
        "must be null with zero.stage=3",
        "Between steps a rank holds parts of weights, not the weights that are averaged",
        f"{_STAGE_3}: _partition_all_parameters",
        "zero.stage=2",
    ),
    Row(
        "activation_checkpoint.name",
        lambda c: c.zero.stage == 3 and c.activation_checkpoint.name != "none",
        "must be none with zero.stage=3",
        "The second forward finds weights gathered or dropped otherwise, and torch compares what it saved",
        f"{_STAGE_3}: partitioned weights have no elements; torch.utils.checkpoint compares metadata",
        "zero.stage=2",
    ),
    Row(
        "offload.activations",
        lambda c: c.zero.stage == 3 and c.offload.activations != "none",
        "must be none with zero.stage=3",
        "Its hooks would copy every gathered weight that autograd saves to the host and keep it there",
        _OWN,
        "zero.stage=2",
    ),
    Row(
        "compile",
        lambda c: _shares(c) and c.compile,
        "must be false with zero.stage=1, 2 or 3",
        "Gradient hooks inside compiled backwards fire in another order on another stream",
        f"{_STAGE_12}: IPGBucket, copy_streams (#8061)",
        "compile=false",
    ),
    Row(
        "schedule.post_validation",
        lambda c: _shares(c) and c.schedule.post_validation,
        "must be false with zero.stage=1, 2 or 3",
        "An update that may be taken back needs a copy of partitions that DeepSpeed's step has written over",
        f"{_STAGE_12}: step",
        "schedule.post_validation=false",
    ),
    Row(
        "data.batch_size",
        lambda c: _shares(c) and 0 < c.data.batch_size < c.parallelism.data,
        "must be at least parallelism.data with zero.stage=1, 2 or 3",
        "Every replica takes part in every reduction",
        _OWN,
        "data.batch_size=32",
    ),
)
