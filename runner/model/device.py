"""Determines the device on which a run's tensors are."""

from __future__ import annotations

from runner.config.schema import RunConfig

__all__ = ["device_is_here", "device_memory_bytes", "device_type"]


def device_type(config: RunConfig) -> str:
    """``cpu`` or ``cuda``; ``device=auto`` takes CUDA if it is available."""
    if config.device == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def device_is_here(config: RunConfig) -> bool:
    """Whether this machine has the device of the run; a machine that only plans or submits may not have it."""
    if device_type(config) != "cuda":
        return True
    import torch

    return torch.cuda.is_available()


def device_memory_bytes(config: RunConfig) -> int | None:
    """Memory of this machine's first accelerator; None if the run does not use one or there is none here."""
    if device_type(config) != "cuda" or not device_is_here(config):
        return None
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)
