"""Derives DeepSpeed's configuration from a request, so that nothing is decided twice."""

from __future__ import annotations

from math import ceil
from typing import Any

from runner.config.deepspeed_file import tuning_of
from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig

__all__ = ["MOST_PREFETCHED", "deepspeed_settings", "keeps_identities"]

MOST_PREFETCHED = 50_000_000
"""The most elements of weights that zero.stage=3 gathers before their use: DeepSpeed's own default."""

_NEVER = 2**31 - 1


_STAGE_3 = 3


def keeps_identities(config: RunConfig) -> bool:
    """Whether modules that read one tensor get that very tensor: hooks of ZeRO 3 give each of them another one."""
    return config.zero.stage != _STAGE_3


def deepspeed_settings(config: RunConfig, *, accelerated: bool) -> dict[str, Any]:
    """The configuration dictionary for DeepSpeed.

    Args:
        config: a request with ``zero.stage``.
        accelerated: whether the device has its own memory, so that offloaded values are in pinned host memory.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": _largest_microbatch(config),
        "gradient_accumulation_steps": 1,  # the runner accumulates gradients, and divides them once
        "gradient_clipping": config.trainer.grad_clip_norm or 0.0,
        "zero_allow_untested_optimizer": True,  # the runner makes the optimizer, by name
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": _NEVER,  # the runner logs instead
        "zero_optimization": _zero(config, accelerated),
    }
    settings |= _precision(config)
    return settings if config.zero.config is None else _laid_over(settings, tuning_of(config.zero.config))


def _laid_over(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """``settings`` with the keys of ``more``, section by section."""
    merged = dict(settings)
    for key, value in more.items():
        merged[key] = _laid_over(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def _largest_microbatch(config: RunConfig) -> int:
    own = -(-config.data.batch_size // config.parallelism.data)
    shares = config.schedule.option("shares")
    return -(-own // config.schedule.microbatches) if shares is None else ceil(own * max(shares) / sum(shares))


def _precision(config: RunConfig) -> dict[str, Any]:
    """The formats of weights and states. The runner does autocast and loss scaling itself."""
    precision = PRECISIONS[config.precision.name]
    if config.zero.stage == 0:  # the runner makes the optimizer and its master weights
        names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
        return {"communication_data_type": names[precision.weights], "gradient_allreduce_op": "sum"}
    if precision.weights == "bfloat16":
        own = not precision.master_weights
        return {
            "bf16": {
                "enabled": True,
                "check_grad_overflow": False,  # the runner checks all ranks, once
                "bf16_master_weights_and_grads": own,
                "bf16_optimizer_states": own,
            }
        }
    if precision.weights == "float16":
        return {"fp16": {"enabled": True, "loss_scale": 1.0}}
    return {}


def _zero(config: RunConfig, accelerated: bool) -> dict[str, Any]:
    zero, offload = config.zero, config.offload
    stage = zero.stage
    settings: dict[str, Any] = {"stage": stage}
    if not stage:
        return settings
    settings |= {"overlap_comm": False, "contiguous_gradients": True, "reduce_bucket_size": zero.bucket_elements}
    if stage == 3:
        settings |= {
            "stage3_param_persistence_threshold": 0,  # every weight is sharded, as planned
            "stage3_prefetch_bucket_size": min(zero.bucket_elements, MOST_PREFETCHED),
        }
    for part, where in (("offload_optimizer", offload.optimizer), ("offload_param", offload.parameters)):
        if where != "none":
            settings[part] = {"device": where, "pin_memory": accelerated}
            if where == "nvme":
                settings[part]["nvme_path"] = offload.nvme_path
    if offload.optimizer != "none" and offload.ratio != 1.0:
        settings["offload_optimizer"]["ratio"] = offload.ratio
        settings["sub_group_size"] = 1  # so that each weight is placed separately
    return settings
