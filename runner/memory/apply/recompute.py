"""Run layers without keeping their saved tensors, and again in the backward, with the same bits.

Stands on the non-reentrant ``torch.utils.checkpoint``. What would differ in the second run is taken care of: random
numbers (the part seeds itself layer by layer, or the generators' state is restored), and buffers that a forward
changes, such as batch norm's running statistics: the second run works on copies of what they were, and so they are
updated once. Such layers go back once per forward.
State that is neither a buffer nor a random generator must not change in a forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from runner.memory.solve.save_ops import SaveChoice
from runner.profiling.saved_scan import operator_name

__all__ = ["ChangedBuffers", "Recompute"]

_Place = tuple[nn.Module, str]


class ChangedBuffers:
    """The buffers of some layers, as they are before a forward that will be run again.

    Args:
        layers: modules.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        modules = dict.fromkeys(module for layer in layers for module in layer.modules())
        self._places: list[_Place] = [(module, name) for module in modules for name in module._buffers]

    def snapshot(self) -> BufferSnapshot:
        """Copies of them."""
        return BufferSnapshot(self._places)


class BufferSnapshot:
    """Buffers as they were; truthy where the forward since has changed some."""

    def __init__(self, places: Sequence[_Place]) -> None:
        pairs = [(place, place[0]._buffers[place[1]]) for place in places]
        self._held = {place: buffer.clone() for place, buffer in pairs if buffer is not None}
        self._versions = {place: buffer._version for place, buffer in pairs if buffer is not None}

    def __bool__(self) -> bool:
        return bool(self._held)

    def forget_unchanged(self) -> None:
        """Drop the copies of what the forward did not change; call it when that has ended."""
        for place, version in self._versions.items():
            buffer = place[0]._buffers[place[1]]
            if buffer is not None and buffer._version == version and _is_same(buffer, self._held[place]):
                del self._held[place]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let modules have the copies as their buffers, and change them."""
        own = {place: place[0]._buffers[place[1]] for place in self._held}
        for (module, name), value in self._held.items():
            module._buffers[name] = value
        try:
            yield
        finally:
            for (module, name), buffer in own.items():
                module._buffers[name] = buffer


def _is_same(buffer: Tensor, before: Tensor) -> bool:
    """Whether a buffer of unchanged version is unchanged: batch norm's kernels write running statistics unnoticed."""
    return not buffer.is_floating_point() or torch.equal(buffer, before)


class Recompute:
    """Goes around a part of a stage.

    Args:
        layers: the part's modules: their buffers are looked after.
        save_ops: preset of operators whose outputs are kept; None = of none.
    """

    def __init__(self, layers: Sequence[nn.Module], save_ops: str | None = None) -> None:
        self._buffers = ChangedBuffers(layers)
        self._save_ops = save_ops

    def __call__(self, run: Callable[[Any], Any], value: Any, *, seeded: bool) -> Any:
        if not torch.is_grad_enabled():
            return run(value)
        leaves, structure = tree_flatten(value)  # tensors in containers are inputs too: hooks outside must see them
        before = self._buffers.snapshot()
        runs = 0

        def part(*given: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs > 2 and before:
                raise RuntimeError("a second backward through layers that change their buffers is not possible")
            with before.restored() if runs > 1 else contextlib.nullcontext():
                return run(tree_unflatten(given, structure))

        options: dict[str, Any] = {}
        if self._save_ops is not None:
            options["context_fn"] = partial(_selective_contexts, self._save_ops)
        output = checkpoint(part, *leaves, use_reentrant=False, preserve_rng_state=not seeded, **options)
        before.forget_unchanged()
        return output


def _selective_contexts(preset: str) -> tuple[Any, Any]:
    """The contexts of one forward and its second run, each counting operators from the start."""
    choices = {False: SaveChoice(preset), True: SaveChoice(preset)}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = choices[bool(context.is_recompute)].keeps(operator_name(operator))
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
