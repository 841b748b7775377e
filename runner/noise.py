"""Silences messages of libraries about themselves, which a user of the runner can do nothing about."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["hide_advice_to_sync", "hide_noise", "silent_output"]

# torchao, which transformers imports too, tells of kernels for other machines that it can do without ("Detected no
# triton", "Failed to load … cutlass"); torch tells torchao of a call that will end; bitsandbytes looks for kernels of
# another package; at the end of a process, torch counts the results of fake operators that it has found again.
_NOISY = ("torchao", "torch.utils._pytree", "bitsandbytes", "torch._subclasses.fake_tensor")
# DeepSpeed, which transformers and PEFT import, sets its logger's level itself, and tells where it found no GPU.
_DEEPSPEEDS = "Setting accelerator to CPU"


def hide_noise() -> None:
    """Let only errors of these libraries through. Call it before they are imported; nothing is imported here."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_no_noise)
    warnings.filterwarnings("ignore", module=r"peft\.")
    # Of torch's own class, where a traced model is copied.
    warnings.filterwarnings("ignore", message=r".isinstance\(treespec, LeafSpec\)", category=FutureWarning)


def hide_advice_to_sync(names: Iterable[str]) -> None:
    """Hide Lightning's advice to log these figures with ``sync_dist``: they are the same on every rank."""
    for name in names:
        message = rf"It is recommended to use `self\.log\('{re.escape(name)}'"
        warnings.filterwarnings("ignore", message=message)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return _DEEPSPEEDS not in record.getMessage()


@contextmanager
def silent_output() -> Iterator[None]:
    """Let nothing through that a library's compiled code writes to the process's standard output within the context.

    HiGHS writes a line for its developers there, whatever it is asked for, and the place is that of a plan's JSON.
    A process without a standard output is left as it is.
    """
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    try:
        if sys.stdout is not None:
            sys.stdout.flush()  # what Python has written before belongs to the user
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
