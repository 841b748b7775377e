"""Requirements of ZeRO and offloading on the machine, checked before anything starts."""

from __future__ import annotations

import ctypes.util
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.errors import Problem

__all__ = ["has_libaio", "zero_needs"]

_HEADERS = (Path("/usr/include"), Path("/usr/local/include"))


def zero_needs(config: RunConfig, *, cuda: bool) -> Iterator[Problem]:
    """Requirements of ZeRO and offloading, besides packages, that this machine does not meet."""
    if config.zero.stage is None:
        return
    for part in ("optimizer", "parameters"):
        if getattr(config.offload, part) == "nvme" and not has_libaio():
            why = "DeepSpeed compiles its async_io operator against libaio, not found here: apt-get install libaio-dev"
            yield Problem(f"offload.{part}", "nvme", "needs libaio", why, f"offload.{part}=cpu")
    if config.zero.stage and not cuda and PRECISIONS[config.precision.name].weights == "float16" and not _has_fp16():
        why = "This CPU has no arithmetic for it (deepspeed/accelerator/cpu_accelerator.py: is_fp16_supported)"
        yield Problem("precision.name", config.precision.name, "must be another with ZeRO here", why, "precision=bf16")


def has_libaio() -> bool:
    """Whether libaio's library and header are found, in the system's folders or by ``CFLAGS`` and ``LDFLAGS``."""
    given = [Path(flag[2:]) for flag in shlex.split(os.environ.get("CFLAGS", "")) if flag.startswith("-I")]
    header = any((folder / "libaio.h").exists() for folder in (*_HEADERS, *given))
    return header and (ctypes.util.find_library("aio") is not None or "aio" in os.environ.get("LDFLAGS", ""))


def _has_fp16() -> bool:
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return False
