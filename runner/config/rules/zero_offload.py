"""The rules of offload, a part of the rows of :mod:`runner.config.rules.zero_table`."""

from __future__ import annotations

from runner.config.rules.table import OWN, Row
from runner.config.rules.zero_facts import (
    CONFIG,
    OFFLOAD,
    STAGE_3,
    STAGE_12,
    has_16_bit_states,
    offloads,
    updated_in_host,
)
from runner.config.schema import RunConfig

__all__ = ["OFFLOAD_ROWS"]

_PLACES = ("none", "cpu", "nvme")

OFFLOAD_ROWS: tuple[Row[RunConfig], ...] = (
    Row(
        "offload.optimizer",
        lambda c: c.offload.optimizer not in _PLACES,
        "must be one of none, cpu, nvme",
        "There are no other places",
        f"{OFFLOAD}: OffloadDeviceEnum",
        "offload.optimizer=cpu",
    ),
    Row(
        "offload.optimizer",
        lambda c: offloads(c) and not c.zero.stage,
        "belongs to zero.stage=1, 2 or 3",
        "What moves the states is ZeRO's optimizer; one device may use it, too",
        f"{OFFLOAD}: DeepSpeedZeroOffloadOptimizerConfig, valid with stage 1, 2, and 3",
        "zero.stage=2",
    ),
    Row(
        "offload.optimizer",
        lambda c: c.offload.optimizer == "nvme" and c.zero.stage != 3,
        "nvme belongs to zero.stage=3",
        "Stages 1 and 2 have no swapper: they take nvme for cpu without a word",
        f"{STAGE_12}: cpu_offload is any device but none",
        "zero.stage=3",
    ),
    Row(
        "offload.optimizer",
        lambda c: offloads(c) and has_16_bit_states(c) and not updated_in_host(c),
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
        f"{OFFLOAD}: OffloadDeviceEnum",
        "offload.parameters=cpu",
    ),
    Row(
        "offload.parameters",
        lambda c: c.offload.parameters != "none" and c.zero.stage != 3,
        "belongs to zero.stage=3",
        "The other stages keep all weights on every device",
        f"{OFFLOAD}: DeepSpeedZeroOffloadParamConfig, valid only with stage 3",
        "zero.stage=3",
    ),
    Row(
        "offload.ratio",
        lambda c: not 0 < c.offload.ratio <= 1,
        "must lie in (0, 1]",
        "It is the part of the states that leaves the device",
        f"{OFFLOAD}: ratio",
        "offload.ratio=1.0",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and not offloads(c),
        "belongs to offload.optimizer=cpu",
        "Nothing leaves the device",
        f"{OFFLOAD}: ratio",
        "offload.ratio=1.0",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and c.zero.stage != 3,
        "must be 1 with zero.stage=1 and 2",
        "Partial offloading is only supported for ZeRO stage 3",
        f"{CONFIG}: offload_ratio_check",
        "zero.stage=3",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and c.offload.optimizer == "nvme",
        "must be 1 with offload.optimizer=nvme",
        "Swapped states have no part that stays",
        f"{OFFLOAD}: ratio is of the states offloaded to CPU Adam",
        "offload.ratio=1.0",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and not updated_in_host(c),
        "must be 1 but with optimizer=cpu_adam",
        "The twin flow's hybrid optimizer takes DeepSpeedCPUAdam only, which is not the optimizer you named",
        f"{STAGE_3}: Hybrid Optimizer Only Supports DeepSpeedCPUAdam",
        "optimizer=cpu_adam",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and c.optimizer.decoupled_weight_decay is False,
        "must be 1 with optimizer.decoupled_weight_decay=false",
        "What stays on the device is updated by torch's AdamW, whose weight decay is decoupled",
        f"{STAGE_3}: backup_optimizer",
        "optimizer.decoupled_weight_decay=true",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and c.offload.delay_from is not None,
        "must be 1 with offload.delay_from",
        "What is delayed wraps the host's optimizer, and the hybrid one takes none that is wrapped",
        f"{STAGE_3}: Hybrid Optimizer Only Supports DeepSpeedCPUAdam",
        "offload.delay_from=null",
    ),
    Row(
        "offload.ratio",
        lambda c: c.offload.ratio != 1 and c.offload.parameters == "nvme",
        "must be 1 with offload.parameters=nvme",
        "Weights that come from a drive get the partition that is updated in the host's memory, whatever the ratio",
        f"{STAGE_3}: _create_fp32_partitions, params_in_nvme_and_cpu",
        "offload.parameters=cpu",
    ),
    Row(
        "offload.nvme_path",
        lambda c: "nvme" in (c.offload.optimizer, c.offload.parameters) and not c.offload.nvme_path,
        "must name a folder on the drive",
        "States and weights are swapped to files in it",
        f"{STAGE_3}: _configure_tensor_swapping",
        "offload.nvme_path=/local_nvme",
    ),
    Row(
        "offload.nvme_path",
        lambda c: "nvme" not in (c.offload.optimizer, c.offload.parameters) and c.offload.nvme_path is not None,
        "belongs to offload.optimizer=nvme",
        "Nothing is swapped to it",
        OWN,
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
        lambda c: c.offload.delay_from is not None and has_16_bit_states(c),
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
        f"{STAGE_12}: _lazy_init_hp_params_optimizer_state",
        "offload.delay_from=1",
    ),
)
