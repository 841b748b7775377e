"""What the layers of a stage save in one forward, on its way to the host's memory and back.

The unit is memory, not a tensor: it is moved as a whole, however many tensors share it. It belongs to the first layer
that saves it. If this layer is moved, it leaves when the layer has run, and comes back when a backward needs any of the
layer's memory. Weights, buffers and the stage's input and output stay on the device.
:mod:`runner.memory.solve.moves` counts the same bytes from a profile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from runner.memory.apply.mover import Memory, MovedTogether, Mover
from runner.model.boundary import flatten
from runner.moved_loads import Returning

__all__ = ["MovedStage", "Saving", "Trip", "unpack"]


class _Run(Protocol):
    def __call__(self, run: Callable[[Any], Any], value: Any, *, seeded: bool) -> Any: ...


class _Moved(NamedTuple):
    """A saved tensor whose memory is moved: what is needed to make it again."""

    trip: Trip
    memory: Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    device: torch.device


class _Staying:
    """Stands for memory that stays on the device, as long as a saved tensor in it is there."""


class _Kept(NamedTuple):
    """A saved tensor whose memory stays."""

    tensor: Tensor
    memory: _Staying


class _Unpack:
    """The hook that gives autograd its saved tensors back; it can be called at any time and again and again."""

    any_time = True

    def __call__(self, saved: Tensor | _Moved | _Kept) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, _Kept):
            return saved.tensor
        storage = saved.trip.bring_back(saved.memory)
        made = torch.empty(0, dtype=saved.dtype, device=saved.device)
        return made.set_(storage, saved.offset, saved.size, saved.stride)


unpack = _Unpack()


class Trip:
    """One forward of a stage and its backward.

    Args:
        mover: moves the memory.
        stays: tensors whose memory stays on the device: weights, buffers, the stage's input.

    Attributes:
        pack: what autograd calls with each tensor that the layer saves that runs now.
    """

    def __init__(self, mover: Mover, stays: Iterable[Tensor]) -> None:
        self.pack: Callable[[Tensor], Tensor | _Moved | _Kept] = self._keep
        self._mover = mover
        self._known: weakref.WeakKeyDictionary[Any, Callable[[], Memory | _Staying | None] | None]
        self._known = weakref.WeakKeyDictionary()
        self._known.update((storage, None) for storage in _storages(stays))
        self._saved: list[weakref.ref[Memory]] = []  # by the layer that runs
        self._moved: list[MovedTogether] = []
        self._back: Returning[MovedTogether] | None = None

    @contextmanager
    def saving(self, *, moved: bool) -> Iterator[None]:
        """The context in which a layer runs forward.

        Args:
            moved: whether its memory is moved.
        """
        self.pack = self._pack if moved else self._keep
        with saved_tensors_hooks(self.pack, unpack):
            yield

    def leave(self, output: Any, *, one_by_one: bool = False) -> None:
        """Begin to move what a layer has saved.

        Args:
            output: tensors whose memory stays: the stage's output, or None.
            one_by_one: see :meth:`runner.memory.apply.mover.Mover.send`.
        """
        staying = set(_storages(flatten(output)[0] if output is not None else []))
        saved = [memory for each in self._saved if (memory := each()) is not None]  # a layer may have dropped some
        going = [memory for memory in saved if memory.storage not in staying]
        self._saved = []
        if going:
            self._moved.append(self._mover.send(going, one_by_one=one_by_one))
            self._back = None

    def expect_backward(self, *, all_at_once: bool) -> None:
        """Begin to fetch, because the backward is the next that the rank does.

        Args:
            all_at_once: whether it will need everything at its beginning; otherwise only the last layers are fetched,
                and each is replaced by earlier ones when it is used.
        """
        self._fetch_ahead(all_at_once=all_at_once)

    def bring_back(self, memory: Memory) -> torch.UntypedStorage:
        """The memory on the device, after waiting for it."""
        moved = memory.together
        if moved is not None and not moved.is_used:
            if self._returning.is_away(moved):
                self._mover.fetch(moved)
            self._mover.use(moved)
            self._returning.use(moved)
            self._fetch_ahead()
        assert memory.storage is not None
        return memory.storage

    @property
    def _returning(self) -> Returning[MovedTogether]:
        """What comes back of all that has left."""
        if self._back is None:
            sizes = {moved: moved.num_bytes for moved in self._moved}
            self._back = Returning(sizes, {moved for moved in self._moved if moved.one_by_one})
        return self._back

    def _fetch_ahead(self, *, all_at_once: bool = False) -> None:
        for moved in self._returning.ahead(all_at_once=all_at_once):
            self._mover.fetch(moved)

    def _keep(self, tensor: Tensor) -> Tensor | _Moved | _Kept:
        return self._packed(tensor, moves=False)

    def _pack(self, tensor: Tensor) -> Tensor | _Moved | _Kept:
        return self._packed(tensor, moves=True)

    def _packed(self, tensor: Tensor, *, moves: bool) -> Tensor | _Moved | _Kept:
        """What autograd keeps of a tensor that it saves."""
        tensor = tensor.detach()
        memory = self._memory_of(tensor, moves=moves)
        if memory is None:
            return tensor
        if isinstance(memory, _Staying):
            return _Kept(tensor, memory)
        memory.note(tensor)
        offset = int(tensor.storage_offset())
        return _Moved(self, memory, tensor.dtype, tensor.size(), tensor.stride(), offset, tensor.device)

    def _memory_of(self, tensor: Tensor, *, moves: bool) -> Memory | _Staying | None:
        """The memory of a tensor, or None if it is the stage's own; it is moved or stays as its first layer says.

        A layer that has let go of a tensor again does not count: a checkpoint that will need nothing lets go of its
        input.
        """
        if not _has_own_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        known = self._known.get(storage, _dropped)
        if known is None or (memory := known()) is not None:
            return None if known is None else memory
        made = Memory(storage) if moves and storage.nbytes() else _Staying()
        self._known[storage] = weakref.ref(made)
        if isinstance(made, Memory):
            self._saved.append(weakref.ref(made))
        return made


class MovedStage:
    """The trip of the forward that a stage runs now; None if its saved tensors stay, as in a validation."""

    def __init__(self) -> None:
        self.trip: Trip | None = None

    @contextmanager
    def on(self, trip: Trip) -> Iterator[None]:
        """The context of a forward that is a trip."""
        self.trip = trip
        try:
            yield
        finally:
            self.trip = None


class Saving:
    """Wraps a part of a stage so that its saved tensors take part in the stage's trip.

    Args:
        stage: the stage.
        moved: whether the part is moved.
        one_by_one: see :meth:`runner.memory.apply.mover.Mover.send`.
        is_last: whether the part's output is that of the stage.
        around: what wraps the part besides; None: nothing.
    """

    def __init__(self, stage: MovedStage, *, moved: bool, one_by_one: bool, is_last: bool, around: _Run | None) -> None:
        self._stage, self._is_last, self._around = stage, is_last, around
        self._moved, self._one_by_one = moved, one_by_one

    def __call__(self, run: Callable[[Any], Any], value: Any, *, seeded: bool) -> Any:
        trip = self._stage.trip
        if trip is None:
            return self._run(run, value, seeded)
        with trip.saving(moved=self._moved):
            output = self._run(run, value, seeded)
        trip.leave(output if self._is_last else None, one_by_one=self._one_by_one)
        return output

    def _run(self, run: Callable[[Any], Any], value: Any, seeded: bool) -> Any:
        return run(value) if self._around is None else self._around(run, value, seeded=seeded)


def _dropped() -> None:
    """Stands for memory to which nothing refers any more."""


def _has_own_storage(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory, real or fake: no sparse one, and no subclass that wraps others."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) or hasattr(tensor, "fake_mode")
    return tensor.layout is torch.strided and is_plain


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors if _has_own_storage(tensor)]
