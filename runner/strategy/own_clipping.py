"""Refuses that a hook clips the gradients that one rank has by their norm alone, where other ranks have the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.utils import clip_grad

from runner.errors import Problem, RequestError

__all__ = ["refusing_norms_of_a_part"]

_NORM: Any = "_get_total_norm"  # of torch, which clip_grad_norm_ calls


@contextmanager
def refusing_norms_of_a_part(hook: str, *, divided: bool) -> Iterator[None]:
    """The block, in which ``clip_grad_norm_`` takes one whole weight at most.

    Args:
        hook: whose it is, for the message.
        divided: whether ranks have parts of weights, or DeepSpeed has the gradients, so that it takes none.
    """
    own = getattr(clip_grad, _NORM)

    def norm(gradients: Any, *args: Any, **kwargs: Any) -> Any:
        if divided or len(gradients) > 1:
            rule, why = "must not clip gradients by their norm", "A rank has those of its own part of the model at most"
            fix = "trainer.grad_clip_norm=1.0, which clips by the norm of all"
            raise RequestError([Problem("on_before_optimizer_step", hook, rule, why, fix)])
        return own(gradients, *args, **kwargs)

    setattr(clip_grad, _NORM, norm)
    try:
        yield
    finally:
        setattr(clip_grad, _NORM, own)
