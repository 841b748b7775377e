"""Copies of the buffers of modules, with which a forward can be run again, or undone, as if it had not run.

A forward may change what is in a buffer, put another tensor in its place (a mask that grows), or register a new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["BufferSnapshot", "ChangedBuffers", "overlaps", "put_buffer", "saved_shapes"]


class ChangedBuffers:
    """Copies the buffers of some layers before a forward that will be run again.

    Args:
        layers: the modules whose buffers are copied.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(module for layer in layers for module in layer.modules()))

    def snapshot(self) -> BufferSnapshot:
        """Copy the buffers as they are now."""
        return BufferSnapshot(self._modules)


@dataclass(frozen=True)
class _Register:
    """The buffers of one module: its tensors by name, and which of them are not saved."""

    module: nn.Module
    tensors: Mapping[str, Tensor | None]
    transient: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> _Register:
        return cls(module, dict(module._buffers), frozenset(module._non_persistent_buffers_set))

    def put_back(self) -> None:
        if isinstance(self.module, torch.jit.ScriptModule):  # whose buffers are fixed, and only get other values
            for name, tensor in self.tensors.items():
                self.module._buffers[name] = tensor
            return
        self.module._buffers.clear()
        self.module._buffers.update(self.tensors)
        self.module._non_persistent_buffers_set = set(self.transient)

    def is_the_same(self, other: _Register) -> bool:
        """Whether both have the very same tensors, whatever is in them."""
        if self.transient != other.transient or self.tensors.keys() != other.tensors.keys():
            return False
        return all(other.tensors[name] is tensor for name, tensor in self.tensors.items())


class BufferSnapshot:
    """The buffers of modules as they were; true if it still holds any.

    After ``forget_unchanged`` it holds those that a forward has changed.

    Args:
        modules: the modules, each once; the modules inside them are not looked at.
        copied: whether their values are kept, too, not only which tensors they are.
    """

    def __init__(self, modules: Iterable[nn.Module], *, copied: bool = True) -> None:
        self._registers = [_Register.of(module) for module in modules]
        held = (tensor for register in self._registers for tensor in register.tensors.values())
        self._tensors = {id(tensor): tensor for tensor in held if tensor is not None and copied}
        self._versions = {key: tensor._version for key, tensor in self._tensors.items()}
        self._copies = _copies(self._tensors)

    def __bool__(self) -> bool:
        return any(register.tensors for register in self._registers)

    def forget_unchanged(self) -> None:
        """Drop the copies of buffers that the forward did not change; call it after the forward."""
        self._tensors = {key: tensor for key, tensor in self._tensors.items() if self._has_changed(key)}
        self._copies = {key: self._copies[key] for key in self._tensors}
        self._registers = [register for register in self._registers if self._concerns(register)]

    def _has_changed(self, key: int) -> bool:
        tensor = self._tensors[key]
        return tensor._version != self._versions[key] or not _is_same(tensor, self._copies[key])

    def _concerns(self, register: _Register) -> bool:
        changed = any(id(tensor) in self._tensors for tensor in register.tensors.values())
        return changed or not register.is_the_same(_Register.of(register.module))

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the buffers what they were: the same tensors, with the same values."""
        for register in self._registers:
            register.put_back()
        for key, tensor in self._tensors.items():
            if self._has_changed(key):
                tensor.copy_(self._copies[key])

    @contextlib.contextmanager
    def restored(self, *, fresh: bool = False) -> Iterator[None]:
        """Give modules the copies as their buffers, which they may change, until the context ends.

        Args:
            fresh: give them copies of the copies, so that this can be done again.
        """
        own = [_Register.of(register.module) for register in self._registers]
        lent = _copies(self._copies) if fresh else self._copies
        for register in self._registers:
            tensors = {name: lent.get(id(tensor), tensor) for name, tensor in register.tensors.items()}
            _Register(register.module, tensors, register.transient).put_back()
        try:
            yield
        finally:
            for register in own:
                register.put_back()


def _copies(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copies of tensors by their keys; those that share memory have copies that share memory, too."""
    users: dict[int, list[int]] = {}
    for key, tensor in tensors.items():
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            users.setdefault(tensor.untyped_storage()._cdata, []).append(key)
    memories = {key: place for place, keys in users.items() if len(keys) > 1 for key in keys}
    made: dict[int, Tensor] = {}
    copied: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        place = memories.get(key)
        if place is None:
            made[key] = tensor.clone()
            continue
        if place not in copied:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            copied[place] = whole.clone()
        made[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            copied[place].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    return made


def _is_same(buffer: Tensor, before: Tensor) -> bool:
    """Whether a buffer is unchanged; its version does not tell, as batch norm's kernels change buffers without it."""
    if not buffer.is_floating_point() or buffer.layout is not torch.strided:
        return True
    return torch.equal(buffer, before)


def overlaps(tensor: Tensor) -> bool:
    """Whether several elements of a tensor are the same memory, as those of ``expand``."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def saved_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the buffers of ``module`` that are saved, by their names in it, without those that are None."""
    return {
        f"{path}.{name}" if path else name: tuple(value.shape)
        for path, owner in module.named_modules(remove_duplicate=False)
        for name, value in owner._buffers.items()
        if value is not None and name not in owner._non_persistent_buffers_set
    }


@torch.no_grad()
def put_buffer(module: nn.Module, name: str, value: Tensor) -> bool:
    """Set a buffer of ``module`` to a copy of a saved value, whatever its shape is now; make it if it is not there.

    Args:
        module: holds it, or a module inside.
        name: its name in ``module``.
        value: the saved value.

    Returns:
        whether there is a module for it; if not, nothing is changed.
    """
    path, _, leaf = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return False
    held = owner._buffers.get(leaf)
    if held is not None and held.shape == value.shape and (not overlaps(held) or torch.equal(held.cpu(), value.cpu())):
        if not overlaps(held):
            held.copy_(value)
        return True
    device = next((tensor.device for tensor in (held, *module.parameters()) if tensor is not None), value.device)
    owner.register_buffer(leaf, value.to(device=device, dtype=held.dtype if held is not None else None, copy=True))
    return True
