"""Notes the weights and buffers of a model that not every option can handle, while its layers are profiled."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from torch._guards import detect_fake_mode

from runner.model.dense_parts import SPARSE_LAYOUTS
from runner.model.layers import LayerSource
from runner.model.odd_tensors import changing_memory
from runner.profile import OddWeight

__all__ = ["OddTensors"]


class OddTensors:
    """Sees every layer before it is converted, and again after its forward.

    Attributes:
        weights: the weights that are complex, have no elements or were not made in fp32.
    """

    def __init__(self) -> None:
        self.weights: list[OddWeight] = []
        self._seen: set[int] = set()
        self._before: dict[int, tuple[int, int]] = {}
        self._changed: set[int] = set()
        self._users: dict[int, set[int]] = defaultdict(set)  # memory of a buffer: the layers that use it
        self._names: dict[int, str] = {}

    def see(self, source: LayerSource, module: nn.Module) -> None:
        """Note a layer as its function makes it.

        Raises:
            RuntimeError: a buffer is sparse and fake, so that its bytes are not known; on real tensors they are.
        """
        for name, parameter in module.named_parameters():
            plain = parameter.dtype is torch.float32 and parameter.numel()
            if not plain and id(parameter) not in self._seen:
                self._seen.add(id(parameter))
                dtype = str(parameter.dtype).removeprefix("torch.")
                full = source.full_name(name)
                self.weights.append(OddWeight(full, dtype, parameter.numel(), parameter.requires_grad))
        for name, buffer in module.named_buffers():
            if buffer.layout in SPARSE_LAYOUTS and detect_fake_mode(buffer) is not None:
                raise RuntimeError(f"{source.full_name(name)} is sparse: how many elements it has is not known")
            (memory,) = changing_memory([buffer])
            self._users[memory].add(source.index)
            self._names.setdefault(memory, source.full_name(name))
        self._before = changing_memory(module.buffers())

    def changed(self, source: LayerSource, module: nn.Module) -> None:
        """Note which buffers the forward of the layer that was seen last has changed, put in their place, or made."""
        after = changing_memory(module.buffers())
        self._changed |= {memory for memory, state in self._before.items() if after.get(memory) != state}
        for name, buffer in module.named_buffers():
            (memory,) = changing_memory([buffer])
            if memory not in self._before:
                self._names[memory] = source.full_name(name)
                self._changed.add(memory)

    def changed_buffers(self) -> tuple[str, ...]:
        """The first names of buffers that a forward changes."""
        return tuple(dict.fromkeys(name for memory, name in self._names.items() if memory in self._changed))

    def shared_buffers(self) -> tuple[str, ...]:
        """The first names of those of them that several layers use."""
        shared = (memory for memory in self._names if memory in self._changed and len(self._users[memory]) > 1)
        return tuple(self._names[memory] for memory in shared)
