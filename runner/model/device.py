"""Which device a run's tensors live on."""

from __future__ import annotations

from runner.config.schema import RunConfig

__all__ = ["device_memory_bytes", "device_type"]


def device_type(config: RunConfig) -> str:
    """``cpu`` or ``cuda``; ``device=auto`` takes CUDA where there is one."""
    if config.device == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def device_memory_bytes(config: RunConfig) -> int | None:
    """Memory of this machine's first accelerator; None where the run does not use one."""
    if device_type(config) != "cuda":
        return None
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)
