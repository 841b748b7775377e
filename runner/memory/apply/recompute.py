"""Runs layers without keeping their saved tensors, and runs them again in the backward, with the same bits.

It uses the non-reentrant ``torch.utils.checkpoint`` and makes equal what would differ in the second run. Random
numbers: the part seeds itself layer by layer, or the state of the generators is restored. Buffers that a forward
changes, such as batch norm's running statistics: the second run works on copies of their earlier values, so that they
are updated once. Such layers allow only one backward per forward.
A hook that a layer puts on its own input is one of the first run: the second run has other tensors with the same memory
as its input, through which no gradient goes. State that is neither a buffer nor a random generator must not change in a
forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._fuser import optimized_execution
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _StopRecomputationError,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from runner.memory.solve.save_ops import SaveChoice
from runner.model.boundary import enter_graph, flatten, unflatten
from runner.model.buffers import BufferSnapshot, ChangedBuffers
from runner.profiling.saved_scan import operator_name

__all__ = ["Recompute"]

_IN_A_SCRIPT = "The following operation failed in the TorchScript interpreter"

_running_again: ContextVar[bool] = ContextVar("running_again", default=False)
"""Whether a part is run again. Parts inside are then run again from what they kept in the first run."""


class Recompute:
    """Wraps a part of a stage so that it is computed again in the backward.

    Args:
        layers: the part's modules, whose buffers must be updated only once.
        save_ops: preset of operators whose outputs are kept; None = no outputs are kept.
    """

    def __init__(self, layers: Sequence[nn.Module], save_ops: str | None = None) -> None:
        self._buffers = ChangedBuffers(layers)
        self._save_ops = save_ops

    def __call__(self, run: Callable[[Any], Any], value: Any, *, seeded: bool) -> Any:
        if not torch.is_grad_enabled():
            return run(value)
        tensors, structure = flatten(value)  # tensors in containers are inputs too, which outer hooks must see
        before = BufferSnapshot([]) if _running_again.get() else self._buffers.snapshot()
        runs = 0

        def part(*given: Tensor) -> Any:
            nonlocal runs
            runs += 1
            if runs > 2 and before:
                raise RuntimeError("a second backward through layers that change their buffers is not possible")
            with optimized_execution(False):  # else TorchScript saves other tensors in later runs than in the first
                if runs == 1:
                    return run(unflatten(given, structure))
                with self._again(before), _stopping():
                    return run(unflatten([_apart(tensor) for tensor in given], structure))

        options: dict[str, Any] = {}
        if self._save_ops is not None:
            options["context_fn"] = partial(_selective_contexts, self._save_ops)
        output = checkpoint(part, *tensors, use_reentrant=False, preserve_rng_state=not seeded, **options)
        before.forget_unchanged()
        return output

    @staticmethod
    @contextlib.contextmanager
    def _again(before: BufferSnapshot) -> Iterator[None]:
        token = _running_again.set(True)
        try:
            with before.restored():
                yield
        finally:
            _running_again.reset(token)


def _apart(tensor: Tensor) -> Tensor:
    """A tensor of the input for a second run: another one over the same memory, behind which there is no graph.

    What the part does with its input, such as hooking on its gradient, it has done to the tensor of the first run.
    A policy that chooses among the part's operators does not see the one that is made here, which the first run lacks.
    """
    with _disable_current_modes():
        apart: Tensor = enter_graph(tensor.detach().requires_grad_(tensor.requires_grad))
    return apart


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """Let torch's checkpoint see that it has stopped a second run, also where TorchScript has made an error of it.

    The checkpoint raises an error without a text from within an operator when it has all that it needs. It says itself
    if something was missing.
    """
    try:
        yield
    except RuntimeError as error:
        if _IN_A_SCRIPT in str(error) and str(error).rstrip().endswith("RuntimeError:"):
            raise _StopRecomputationError from None
        raise


def _selective_contexts(preset: str) -> tuple[Any, Any]:
    """The contexts of a forward and of its second run; each counts operators from the start."""
    choices = {False: SaveChoice(preset), True: SaveChoice(preset)}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = choices[bool(context.is_recompute)].keeps(operator_name(operator))
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
