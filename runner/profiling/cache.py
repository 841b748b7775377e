"""Caches layer profiles on disk, so that planning the same run twice measures only once.

The key of a profile contains all that it depends on: the model, data and loss with their arguments, the micro-batch,
precision, optimizer, device, threads, the processor, torch, the source of every module outside the installed packages
(so an edited model is profiled again), and what the model's and the data's functions make and read
(:mod:`runner.profiling.form`). Deleting the folder is always safe.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from runner.config.deepspeed import keeps_identities
from runner.config.links import cache_root
from runner.config.schema import LrSchedulerConfig, OptimizerConfig, RunConfig
from runner.model.targets import import_users_code
from runner.optim.catalogue.registry import optimizer_of
from runner.plan.requested_schedule import num_stages
from runner.profile import NOTICEABLE_SHARE, ModelProfile, profile_from_json
from runner.profiling.busy import busy_share
from runner.profiling.form import digest_of_sources, form_of
from runner.record import write_atomically
from runner.targets import with_environment

__all__ = ["cached_profile", "known_profile"]


def cached_profile(config: RunConfig, make: Callable[[RunConfig], ModelProfile]) -> ModelProfile:
    """The profile of a request, from the cache or newly made and then saved. Errors of the cache are ignored.

    One whose seconds were measured while others used the processor is measured again when they do not.
    """
    path, known = _kept(config)
    if known is not None:
        return known
    profile = make(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, profile.to_json())
    except OSError:
        pass
    return profile


def known_profile(config: RunConfig) -> ModelProfile | None:
    """The profile of a request from the cache; None if it is to be made."""
    return _kept(config)[1]


def _kept(config: RunConfig) -> tuple[Path, ModelProfile | None]:
    """Where the profile of a request is kept, and the profile if it is there and may be used."""
    import_users_code(config)  # so that its sources are part of the key
    optimizer_of(config.optimizer)
    form = form_of(config)
    path = _folder() / f"{_key(config, form)}.json"
    if form is not None and not config.profile.refresh:
        with suppress(OSError, ValueError, TypeError, KeyError):
            known = profile_from_json(path.read_text(encoding="utf-8"))
            if not (known.is_disturbed and busy_share() <= NOTICEABLE_SHARE):
                return path, known
    return path, None


def _folder() -> Path:
    return cache_root() / "profiles"


def _key(config: RunConfig, form: Mapping[str, Any] | None) -> str:
    depends = {
        "model": [config.model.target, with_environment(config.model.kwargs), config.model.split_points, _cut(config)],
        "sizes": _digest_of_config_file(config),
        "trained": [config.trainer.freeze, asdict(config.adapter), asdict(config.embedding)],
        "data": [config.data.target, with_environment(config.data.kwargs), config.data.collate, config.data.shuffle],
        "loss": [config.loss.name, config.loss.target, with_environment(config.loss.kwargs)],
        "own": _beside_its_own(config),
        "samples": [config.data.batch_size, config.parallelism.data, config.schedule.parts],
        "parts": [
            config.parallelism.tensor,
            config.parallelism.sharding,
            config.parallelism.sequence,
            config.parallelism.loss,
            config.parallelism.batch_sliced,
        ],
        "entries": config.parallelism.tensor > 1 and keeps_identities(config),
        "precision": config.precision.name,
        "approximate_backward": asdict(config.approximate_backward),
        "kernels": asdict(config.kernels),
        "compression": asdict(config.compression),
        "optimizer": [
            config.optimizer.name,
            config.optimizer.momentum,
            config.optimizer.target,
            with_environment(config.optimizer.kwargs),
            config.trainer.ema_decay is not None,
        ],
        "seed": config.seed,
        "machine": [config.device, config.trainer.threads, _processor(), os.cpu_count(), torch.__version__],
        "hardware": [config.hardware.name, config.hardware.flops],
        "sources": digest_of_sources(),
        "form": form,
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _digest_of_config_file(config: RunConfig) -> str | None:
    """Digest of the file from which the model's function reads its sizes; None if there is none."""
    if config.model.pretrained is None or config.model.config_file is None:
        return None
    with suppress(OSError):
        return hashlib.sha256(Path(config.model.pretrained, config.model.config_file).read_bytes()).hexdigest()
    return None


def _beside_its_own(config: RunConfig) -> list[object]:
    """Settings that may be refused beside a LightningModule's own, which profiling finds out."""
    return [
        config.optimizer.name == "auto" and config.optimizer != OptimizerConfig(name="auto"),
        config.optimizer.name == "auto" and config.lr_scheduler != LrSchedulerConfig(name="constant"),
        config.loss.name == "auto" and (config.compile or config.activation_checkpoint.name != "none"),
    ]


def _cut(config: RunConfig) -> list[int]:
    """The settings on which the cut of a traced model depends."""
    return [config.parallelism.pipeline, num_stages(config)]


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
