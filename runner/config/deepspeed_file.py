"""Checks a hand-written DeepSpeed configuration, key by key, against the request.

What the runner decides (batches, clipping, precision, optimizer, stage, offload) may be repeated, but not with another
value; ``auto`` is always accepted. Keys that only tune are passed on. Every other key is refused: nothing is dropped
silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.errors import Problem, did_you_mean

__all__ = ["file_problems", "tuning_of"]

_AUTO = "auto"
_TUNING = (
    *(f"zero_optimization.{key}" for key in ("allgather_bucket_size", "reduce_bucket_size", "sub_group_size")),
    *(f"zero_optimization.{key}" for key in ("allgather_partitions", "reduce_scatter", "round_robin_gradients")),
    *(f"zero_optimization.stage3_{key}" for key in ("max_live_parameters", "max_reuse_distance")),
    *(f"zero_optimization.stage3_{key}" for key in ("prefetch_bucket_size", "param_persistence_threshold")),
    *(f"zero_optimization.offload_optimizer.{key}" for key in ("pin_memory", "buffer_count", "fast_init")),
    *(f"zero_optimization.offload_optimizer.{key}" for key in ("pipeline_read", "pipeline_write")),
    *(f"zero_optimization.offload_param.{key}" for key in ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu")),
    *(f"aio.{key}" for key in ("block_size", "queue_depth", "thread_count", "single_submit", "overlap_events")),
)
_LEARNING_RATE = "lr_scheduler=NAME: the runner sets the learning rate of every step"


def file_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of ``zero.config``: it cannot be read, contradicts the request or has unknown keys; names both paths."""
    if config.zero.config is None or config.zero.stage is None:
        return
    try:
        flat = dict(_flat(_read(config.zero.config)))
    except (OSError, ValueError) as error:
        yield Problem("zero.config", config.zero.config, "must be a JSON file", str(error), "zero.config=null")
        return
    decided = _decided(config)
    for key, value in flat.items():
        if value == _AUTO or (key in _TUNING and key not in decided):
            continue
        path = f"{config.zero.config}:{key}"
        if key.startswith("scheduler"):
            yield Problem(path, value, "belongs to lr_scheduler", _LEARNING_RATE, "no scheduler in the file")
        elif key not in decided:
            near = did_you_mean(key, [*decided, *_TUNING])
            why = "The runner neither decides it nor passes it on unseen"
            yield Problem(path, value, "there is no such key here", why, near or "")
        elif not _is_same(value, decided[key][1]):
            own, wanted = decided[key]
            why = f"The request says {own}, so that it is {wanted}"
            fix = f"{key} = {_AUTO}, or another {own.partition(' ')[0]}"
            yield Problem(path, value, f"contradicts {own}", why, fix)


def tuning_of(path: str) -> dict[str, Any]:
    """The tuning keys of a checked file, nested as DeepSpeed expects them."""
    nested: dict[str, Any] = {}
    for key, value in _flat(_read(path)):
        if key in _TUNING and value != _AUTO:
            *sections, last = key.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
    return nested


def _decided(config: RunConfig) -> dict[str, tuple[str, Any]]:
    """Each DeepSpeed key that the runner decides: the part of the request that decides it, and its value."""
    zero, offload, optimizer, precision = config.zero, config.offload, config.optimizer, config.precision.name
    clip = config.trainer.grad_clip_norm or 0.0
    weights = PRECISIONS[precision].weights if precision in PRECISIONS else precision
    share = -(-config.data.batch_size // config.parallelism.data)
    decided: dict[str, tuple[str, Any]] = {
        "train_batch_size": (f"data.batch_size = {config.data.batch_size}", config.data.batch_size),
        "train_micro_batch_size_per_gpu": (
            f"schedule.microbatches = {config.schedule.microbatches}",
            -(-share // config.schedule.microbatches),
        ),
        "gradient_accumulation_steps": (
            f"schedule.microbatches = {config.schedule.microbatches}",
            config.schedule.microbatches,
        ),
        "gradient_clipping": (f"trainer.grad_clip_norm = {config.trainer.grad_clip_norm}", clip),
        "fp16.enabled": (f"precision = {precision}", weights == "float16"),
        "bf16.enabled": (f"precision = {precision}", weights == "bfloat16"),
        "zero_optimization.stage": (f"zero.stage = {zero.stage}", zero.stage),
        "zero_optimization.offload_optimizer.device": (f"offload.optimizer = {offload.optimizer}", offload.optimizer),
        "zero_optimization.offload_optimizer.ratio": (f"offload.ratio = {offload.ratio}", offload.ratio),
        "zero_optimization.offload_param.device": (f"offload.parameters = {offload.parameters}", offload.parameters),
        "optimizer.type": (f"optimizer = {optimizer.name}", optimizer.name),
    }
    for part in ("offload_optimizer", "offload_param"):
        decided[f"zero_optimization.{part}.nvme_path"] = (f"offload.nvme_path = {offload.nvme_path}", offload.nvme_path)
    if offload.ratio != 1.0:
        decided["zero_optimization.sub_group_size"] = (f"offload.ratio = {offload.ratio}", 1)
    for key in ("lr", "betas", "eps", "weight_decay", "momentum"):
        value = getattr(optimizer, key)
        decided[f"optimizer.params.{key}"] = (f"optimizer.{key} = {value}", value)
    return decided


def _is_same(value: Any, wanted: Any) -> bool:
    if isinstance(value, str) and isinstance(wanted, str):
        return value.lower() == wanted.lower()
    return bool(value == wanted)


def _read(path: str) -> Mapping[str, Any]:
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError("it holds no object")
    return document


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
