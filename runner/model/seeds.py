"""Random numbers of a user's code: the same on every rank, in every layout, and after a resume.

A user's function may draw from Python's, NumPy's or torch's generators. Whatever calls such a function seeds all three
from the run's seed and from what the call is for, and restores them afterwards. So what is drawn does not depend on the
rank, on how often something else has drawn, or on the process having been started anew.

A generator of the user's own, such as ``np.random.default_rng()``, cannot be seeded from here. Ranks that must agree
compare what they got instead: see :mod:`runner.training.data.agreement` and :mod:`runner.engine.update.copies`.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

__all__ = [
    "OWN_GENERATOR",
    "keep_generators",
    "mix_seed",
    "seed_generators",
    "seed_process",
    "seed_torch",
    "seeded",
    "seeded_with",
]

_MASK = (1 << 63) - 1
_NUMPY_SEEDS = 1 << 32

OWN_GENERATOR = (
    "draw from random, np.random or torch, which the runner seeds, or seed each generator of its own with a constant, "
    "as in np.random.default_rng(0)"
)
"""What to do about random numbers that differ between ranks, for messages."""


def mix_seed(*parts: int | str) -> int:
    """A 63-bit seed from integers and names; it depends on every part and on their order (splitmix64's finaliser)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part & 0xFFFFFFFFFFFFFFFF
        state = (state ^ number) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators; about seven microseconds."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's generator alone, and that of this process's CUDA device if it is in use; about one microsecond.

    ``torch.manual_seed`` would also seed accelerators that are not in use yet, and record a stack trace for each. This
    takes up to milliseconds, and layers are seeded one by one.
    """
    torch.default_generator.manual_seed(seed)
    for generator in _cuda_generators():
        generator.manual_seed(seed)


def seed_process(seed: int) -> None:
    """Seed the generators of a new rank; all ranks get the same, for the user's code that runs outside of any scope.

    Such code is, for example, a callback or an optimizer. It draws the same numbers on every replica.
    """
    seed_generators(seed)
    torch.manual_seed(seed)  # also accelerators that are used later


def keep_generators() -> Callable[[], None]:
    """Return a function that restores the present states of the generators of :func:`seed_generators`."""
    python, numpy = random.getstate(), np.random.get_state()
    states = [(generator, generator.get_state()) for generator in (torch.default_generator, *_cuda_generators())]

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in states:
            generator.set_state(state)

    return restore


@contextlib.contextmanager
def seeded_with(seed: int) -> Iterator[None]:
    """Within the block the generators start at ``seed``; after it they are as they were before."""
    restore = keep_generators()
    seed_generators(seed)
    try:
        yield
    finally:
        restore()


def seeded(*parts: int | str) -> contextlib.AbstractContextManager[None]:
    """Like :func:`seeded_with`, with a seed mixed from ``parts``: the run's seed, and what the block is for."""
    return seeded_with(mix_seed(*parts))


def _cuda_generators() -> Sequence[torch.Generator]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    return (torch.cuda.default_generators[torch.cuda.current_device()],)
