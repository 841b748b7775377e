"""A pool of saved tensors as a simulated arena: each has an address, and what is dropped for it lies side by side.

The addresses are those of a memory in one piece of the pool's size; torch's own allocator gives others. So the pool
never needs more memory than its size, however much an allocator that moves nothing would lose between tensors.

Source: Zhang et al. 2023, Coop: Memory is not a Commodity.
"""

from __future__ import annotations

from runner.memory.apply.evicting import Evicting, Pool
from runner.memory.apply.operators import Value
from runner.memory.solve.arena import Arena, ArenaProgram
from runner.model.layers import Part, StageModule

__all__ = ["ArenaPool", "install_arena"]


def install_arena(stage: StageModule, program: ArenaProgram) -> None:
    """Let a stage run with a pool that is an arena."""
    stage.wrap((Part(program.first, program.last),), Evicting(stage, ArenaPool(program)))


class ArenaPool(Pool):
    """See :class:`runner.memory.apply.evicting.Pool`.

    Attributes:
        arena: where the values lie; cheap ones at the beginning, and those at the end that are dearer than the mean.
    """

    def __init__(self, program: ArenaProgram) -> None:
        super().__init__(program)
        self.arena: Arena[Value] = Arena(program.pool_bytes)
        self._cost, self._num_placed = 0.0, 0  # of all values that were placed so far, and their bytes

    def begin(self) -> None:
        """See :class:`runner.memory.apply.evicting.Pool`."""
        super().begin()
        self._cost, self._num_placed = 0.0, 0

    def take(self, value: Value) -> None:
        """See :class:`runner.memory.apply.evicting.Pool`; a place is made for it."""
        dear = value.operator.cost * self._num_placed > self._cost * value.num_bytes
        self._cost, self._num_placed = self._cost + value.operator.cost, self._num_placed + value.num_bytes
        while not self.arena.place(value, value.num_bytes, from_end=dear):
            self.make_room(value.num_bytes, needed=value)
        super().take(value)

    def give_back(self, value: Value) -> None:
        """See :class:`runner.memory.apply.evicting.Pool`."""
        super().give_back(value)
        self.arena.remove(value)

    def make_room(self, num_bytes: int, *, needed: Value | None = None) -> None:
        """See :class:`runner.memory.apply.evicting.Pool`; the room is in one piece."""
        if not num_bytes:  # what is kept has its places
            return
        for held in (False, True):
            costs = {value: self.score(value) * value.num_bytes for value in self.free(needed, held=held)}
            found = self.arena.window(num_bytes, costs.get)
            if found is not None:
                for value in found:
                    self.drop(value)
                return
        raise self.no_room(num_bytes)
