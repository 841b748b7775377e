"""Which device a run's tensors live on."""

from __future__ import annotations

from runner.config.schema import RunConfig

__all__ = ["device_is_here", "device_memory_bytes", "device_type"]


def device_type(config: RunConfig) -> str:
    """``cpu`` or ``cuda``; ``device=auto`` takes CUDA where there is one."""
    if config.device == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def device_is_here(config: RunConfig) -> bool:
    """Whether this machine has what the run computes on; one that only plans or submits may not."""
    if device_type(config) != "cuda":
        return True
    import torch

    return torch.cuda.is_available()


def device_memory_bytes(config: RunConfig) -> int | None:
    """Memory of this machine's first accelerator; None where the run does not use one, or there is none here."""
    if device_type(config) != "cuda" or not device_is_here(config):
        return None
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)
