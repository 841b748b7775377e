"""Run layers without keeping their saved tensors, and again in the backward, with the same bits.

Stands on the non-reentrant ``torch.utils.checkpoint``. What would differ in the second run is taken care of: random
numbers (the part seeds itself layer by layer, or the generators' state is restored), and buffers that a forward
changes, such as batch norm's running statistics: the second run works on copies of what they were, and so they are
updated once. Such layers go back once per forward.
State that is neither a buffer nor a random generator must not change in a forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from runner.memory.solve.save_ops import SaveChoice
from runner.model.saved_scan import operator_name

__all__ = ["Recompute"]

_Place = tuple[nn.Module, str]


class Recompute:
    """Goes around a part of a stage.

    Args:
        layers: the part's modules: their buffers are looked after.
        save_ops: preset of operators whose outputs are kept; None = of none.
    """

    def __init__(self, layers: Sequence[nn.Module], save_ops: str | None = None) -> None:
        modules = dict.fromkeys(module for layer in layers for module in layer.modules())
        self._places: list[_Place] = [(module, name) for module in modules for name in module._buffers]
        self._save_ops = save_ops

    def __call__(self, run: Callable[[Any], Any], value: Any, *, seeded: bool) -> Any:
        if not torch.is_grad_enabled():
            return run(value)
        leaves, structure = tree_flatten(value)  # tensors in containers are inputs too: hooks outside must see them
        before = self._snapshot()
        runs = 0

        def part(*given: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs > 2 and before:
                raise RuntimeError("a second backward through layers that change their buffers is not possible")
            with _buffers_as(before) if runs > 1 else contextlib.nullcontext():
                return run(tree_unflatten(given, structure))

        options: dict[str, Any] = {}
        if self._save_ops is not None:
            options["context_fn"] = partial(_selective_contexts, self._save_ops)
        versions = [None if buffer is None else buffer._version for buffer in self._buffers()]
        output = checkpoint(part, *leaves, use_reentrant=False, preserve_rng_state=not seeded, **options)
        for place, buffer, version in zip(self._places, self._buffers(), versions, strict=True):
            if buffer is not None and buffer._version == version and _is_same(buffer, before[place]):
                del before[place]
        return output

    def _buffers(self) -> list[Tensor | None]:
        return [module._buffers[name] for module, name in self._places]

    def _snapshot(self) -> dict[_Place, Tensor]:
        """Copies of all buffers; of those that this forward does not change they are dropped when it has ended."""
        pairs = zip(self._places, self._buffers(), strict=True)
        return {place: buffer.clone() for place, buffer in pairs if buffer is not None}


def _is_same(buffer: Tensor, before: Tensor) -> bool:
    """Whether a buffer of unchanged version is unchanged: batch norm's kernels write running statistics unnoticed."""
    return not buffer.is_floating_point() or torch.equal(buffer, before)


@contextlib.contextmanager
def _buffers_as(values: dict[_Place, Tensor]) -> Iterator[None]:
    """Let modules have ``values`` as their buffers, and change them."""
    own = {place: place[0]._buffers[place[1]] for place in values}
    for (module, name), value in values.items():
        module._buffers[name] = value
    try:
        yield
    finally:
        for (module, name), buffer in own.items():
            module._buffers[name] = buffer


def _selective_contexts(preset: str) -> tuple[Any, Any]:
    """The contexts of one forward and its second run, each counting operators from the start."""
    choices = {False: SaveChoice(preset), True: SaveChoice(preset)}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = choices[bool(context.is_recompute)].keeps(operator_name(operator))
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
