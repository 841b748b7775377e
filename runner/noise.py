"""Silences messages of libraries about themselves, which a user of the runner can do nothing about."""

from __future__ import annotations

import logging

__all__ = ["hide_noise"]

# torchao, which transformers imports too, tells of kernels for other machines that it can do without ("Detected no
# triton", "Failed to load … cutlass"); torch tells torchao of a call that will end.
_NOISY = ("torchao", "torch.utils._pytree")


def hide_noise() -> None:
    """Let only errors of these libraries through. Call it before they are imported; nothing is imported here."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
