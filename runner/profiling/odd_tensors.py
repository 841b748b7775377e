"""Notes the weights and buffers of a model that not every option can handle, while its layers are profiled."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils.weak import WeakIdKeyDictionary

from runner.model.buffers import saved_shapes
from runner.model.dense_parts import SPARSE_LAYOUTS
from runner.model.layers import LayerSource
from runner.profile import OddWeight

__all__ = ["OddTensors"]


class OddTensors:
    """Sees every layer before it is converted, and again after its forward.

    A layer may be gone when the next one is built, and its tensors' places are then taken by others': tensors and
    memory are told by numbers that are never used again.

    Attributes:
        weights: the weights that are complex, have no elements or were not made in fp32.
    """

    def __init__(self) -> None:
        self.weights: list[OddWeight] = []
        self._seen = WeakIdKeyDictionary()
        self._numbers = WeakIdKeyDictionary()
        self._next = itertools.count()
        self._held: list[Tensor] = []  # the buffers of the layer that was seen last
        self._before: dict[int, tuple[int, int]] = {}
        self._changed: set[int] = set()
        self._users: dict[int, set[int]] = defaultdict(set)  # memory of a buffer: the layers that use it
        self._names: dict[int, str] = {}
        self._saved: set[int] = set()

    def see(self, source: LayerSource, module: nn.Module) -> None:
        """Note a layer as its function makes it.

        Raises:
            RuntimeError: a buffer is sparse and fake, so that its bytes are not known; on real tensors they are.
        """
        for name, parameter in module.named_parameters():
            plain = parameter.dtype is torch.float32 and parameter.numel()
            if not plain and parameter not in self._seen:
                self._seen[parameter] = True
                dtype = str(parameter.dtype).removeprefix("torch.")
                full = source.full_name(name)
                self.weights.append(OddWeight(full, dtype, parameter.numel(), parameter.requires_grad))
        for name, buffer in module.named_buffers():
            if buffer.layout in SPARSE_LAYOUTS and detect_fake_mode(buffer) is not None:
                raise RuntimeError(f"{source.full_name(name)} is sparse: how many elements it has is not known")
            memory = self._memory(buffer)
            self._users[memory].add(source.index)
            self._names.setdefault(memory, source.full_name(name))
        self._note_saved(module)
        self._held = list(module.buffers())
        self._before = self._states(self._held)

    def changed(self, source: LayerSource, module: nn.Module) -> None:
        """Note which buffers the forward of the layer that was seen last has changed, put in their place, or made."""
        after = self._states(module.buffers())
        self._changed |= {memory for memory, state in self._before.items() if after.get(memory) != state}
        for name, buffer in module.named_buffers():
            memory = self._memory(buffer)
            if memory not in self._before:
                self._names[memory] = source.full_name(name)
                self._changed.add(memory)
        self._note_saved(module)

    def _note_saved(self, module: nn.Module) -> None:
        saved = saved_shapes(module)
        self._saved |= {self._memory(buffer) for name, buffer in module.named_buffers() if name in saved}

    def _states(self, buffers: Iterable[Tensor]) -> dict[int, tuple[int, int]]:
        """For the memory of each buffer: an object that holds it, and how often that was changed."""
        return {self._memory(buffer): (self._number(buffer), buffer._version) for buffer in buffers}

    def _memory(self, tensor: Tensor) -> int:
        """What tensors over the same memory have in common; sparse tensors have memory of their own."""
        return self._number(tensor.untyped_storage() if tensor.layout is torch.strided else tensor)

    def _number(self, value: Any) -> int:
        if value not in self._numbers:
            self._numbers[value] = next(self._next)
        number: int = self._numbers[value]
        return number

    def changed_buffers(self) -> tuple[str, ...]:
        """The first names of buffers that a forward changes."""
        return tuple(dict.fromkeys(name for memory, name in self._names.items() if memory in self._changed))

    def unsaved_buffers(self) -> tuple[str, ...]:
        """The first names of those of them that no checkpoint holds."""
        unsaved = (memory for memory in self._names if memory in self._changed - self._saved)
        return tuple(dict.fromkeys(self._names[memory] for memory in unsaved))

    def shared_buffers(self) -> tuple[str, ...]:
        """The first names of those of them that several layers use."""
        shared = (memory for memory in self._names if memory in self._changed and len(self._users[memory]) > 1)
        return tuple(self._names[memory] for memory in shared)
