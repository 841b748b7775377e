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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from runner.config.deepspeed import keeps_identities
from runner.config.links import cache_root
from runner.config.schema import LrSchedulerConfig, OptimizerConfig, RunConfig
from runner.model.loss_trial import num_parts
from runner.model.targets import import_users_code
from runner.optim.catalogue.registry import optimizer_of
from runner.plan.layout.batches import largest_microbatch
from runner.plan.requested_schedule import num_stages
from runner.profile import NOTICEABLE_SHARE, ModelProfile, profile_from_json
from runner.profiling.busy import busy_share
from runner.profiling.form import digest_of_sources, form_of
from runner.record import write_atomically
from runner.targets import with_environment

__all__ = ["cached_profile", "known_profile"]

_FEWEST = [2, 2]  # ranks and stages for which a traced model is cut


def cached_profile(config: RunConfig, make: Callable[[RunConfig], ModelProfile]) -> ModelProfile:
    """The profile of a request, from the cache or newly made and then saved. Errors of the cache are ignored.

    One whose seconds were measured while others used the processor is measured again when they do not.
    """
    fewest, path, known = _kept(config)
    if known is not None:
        return known
    profile = make(config)
    if not profile.cut_finely and len(profile.layers) >= num_stages(config):
        path = fewest
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, profile.to_json())
    except OSError:
        pass
    return profile


def known_profile(config: RunConfig) -> ModelProfile | None:
    """The profile of a request from the cache; None if it is to be made."""
    return _kept(config)[2]


def _kept(config: RunConfig) -> tuple[Path, Path, ModelProfile | None]:
    """Where the profile of a request is kept, and the profile if it is there and may be used.

    A traced model is cut into the layers that the fewest stages ask for, unless there are more stages than such layers.
    So the first place is that of all pipelines that these layers serve, and the second one that of this request alone.
    """
    import_users_code(config)  # so that its sources are part of the key
    optimizer_of(config.optimizer)
    form = form_of(config)
    depends, stages = _depends(config, form), num_stages(config)
    own = _path(depends, [config.parallelism.pipeline, stages])
    fewest = _path(depends, _FEWEST) if config.parallelism.pipeline > 1 else own
    if form is not None and not config.profile.refresh:
        for path in dict.fromkeys((fewest, own)):
            known = _read(path)
            if known is not None and (path == own or len(known.layers) >= stages):
                return fewest, own, known
    return fewest, own, None


def _read(path: Path) -> ModelProfile | None:
    """The profile of a file; None if there is none, or if it is to be measured again."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = profile_from_json(path.read_text(encoding="utf-8"))
        if not (known.is_disturbed and busy_share() <= NOTICEABLE_SHARE):
            return known
    return None


def _folder() -> Path:
    return cache_root() / "profiles"


def _path(depends: Mapping[str, Any], cut: Sequence[int]) -> Path:
    """The file of a profile, by what it depends on, and by the ranks and stages for which a traced model was cut."""
    named = json.dumps({**depends, "cut": cut}, sort_keys=True, default=str)
    return _folder() / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.json"


def _depends(config: RunConfig, form: Mapping[str, Any] | None) -> dict[str, Any]:
    data, parts = config.parallelism.data, config.schedule.parts
    of_replicas = optimizer_of(config.optimizer).compresses or config.compression.name != "none"
    return {
        "model": [config.model.target, with_environment(config.model.kwargs), config.model.split_points],
        "sizes": _digest_of_config_file(config),
        "trained": [config.trainer.freeze, asdict(config.adapter), asdict(config.embedding)],
        "data": [config.data.target, with_environment(config.data.kwargs), config.data.collate, config.data.shuffle],
        "loss": [config.loss.name, config.loss.target, with_environment(config.loss.kwargs)],
        "own": _beside_its_own(config),
        "samples": [config.data.batch_size, largest_microbatch(config.data.batch_size, data, parts), num_parts(config)],
        "replicas": data if of_replicas else None,
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


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
