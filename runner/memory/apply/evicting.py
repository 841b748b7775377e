"""Runs a stage in so much memory: what autograd saves is dropped when it is full, and made again when it is needed.

While a stage runs forward, a dispatch mode notes its operators, and hooks take what autograd saves. Saved tensors lie
in a pool that all micro-batches in flight share. When the pool is full, the value with the least score is dropped. When
a backward asks for it, the operators that lead to it run again, beginning with the nearest values that are there, with
the same inputs, strides and random numbers: gradients are the same bits.

Source: Kirisame et al. 2021, Dynamic Tensor Rematerialization. Seconds are estimated from the bytes and FLOPs of
operators, so that the same run makes the same decisions every time.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from runner.memory.apply.graph_run import tensors_in
from runner.memory.apply.operators import Operator, Place, Recorder, Value
from runner.memory.solve.evicting import EvictingProgram
from runner.model.layers import Part, StageModule

__all__ = ["Evicting", "NoRoomError", "Pool", "install_evicting"]

_HELD = 3  # saved tensors of one backward that are not dropped as long as there are others


class NoRoomError(RuntimeError):
    """More saved tensors are needed at once than a pool may keep."""


def install_evicting(stage: StageModule, program: EvictingProgram) -> None:
    """Let a stage run with a pool of saved tensors."""
    stage.wrap((Part(program.first, program.last),), Evicting(stage, Pool(program)))


class Evicting:
    """Wraps the forward of a stage.

    Args:
        stage: the stage, whose buffers are not changed by operators that run again.
        pool: where what is saved lies.
    """

    def __init__(self, stage: StageModule, pool: Pool) -> None:
        self._stage, self._pool = stage, pool

    def __call__(self, run: Callable[[Any], Any], value: Any, *, seeded: bool) -> Any:
        if not torch.is_grad_enabled():
            return run(value)
        pool = self._pool
        recorder = Recorder(self._stage.buffers(), pool.changed)

        def pack(tensor: Tensor) -> _Slot | Tensor:
            place = recorder.place_of(tensor)
            if place is None:  # a weight, the stage's input, a constant: it is there anyway
                return tensor.detach()
            pool.admit(place.value, tensor)
            return _Slot(pool, place)

        with recorder, torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            output = run(value)
        for tensor in tensors_in(output):
            if (place := recorder.place_of(tensor)) is not None:
                pool.leave_to_caller(place.value, tensor)
        return output


def _unpack(saved: _Slot | Tensor) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.tensor()


class _Slot:
    """What autograd holds of a saved tensor; the pool drops a value in which no slot lies any more."""

    def __init__(self, pool: Pool, place: Place) -> None:
        self._pool, self._place = pool, place
        place.value.slots += 1

    def tensor(self) -> Tensor:
        """The saved tensor, made again if it was dropped."""
        return self._place.within(self._pool.bring(self._place.value))

    def __del__(self) -> None:
        value = self._place.value
        value.slots -= 1
        if not value.slots:
            self._pool.drop(value)


class Pool:
    """The saved values that are kept.

    Args:
        program: says how many bytes of these values and of what is made on the way to others there may be, and by which
            score a value is dropped.
    """

    def __init__(self, program: EvictingProgram) -> None:
        self._limit, self._score = program.pool_bytes, _SCORES[program.score]
        self.clock = 0.0  # cost of the operators that have run again, and of those that made what was saved
        self._kept: set[Value] = set()
        self._num_bytes = 0  # of what is kept, and of what is made on the way
        self._uses = Counter[Value]()  # operators that will run again now, by input
        self._costs: dict[Value, float] = {}  # see :meth:`cost_around`
        self._brought = deque[weakref.ref[Value]](maxlen=_HELD)  # what a backward that runs now may hold

    def admit(self, value: Value, tensor: Tensor) -> None:
        """Keep a value that autograd saves."""
        if value.tensor is None:
            if not self._kept:
                self.begin()
            self._keep(value, tensor)
            self.clock += value.operator.cost
            value.last_use = self.clock
            self.make_room(0, needed=value)

    def begin(self) -> None:
        """Begin with an empty pool as if nothing had been in it, so that every micro-batch alone is treated alike."""
        self.clock = 0.0

    def bring(self, value: Value) -> Tensor:
        """A tensor with the value's storage."""
        if value.tensor is None:
            self._make_again(value)
        assert value.tensor is not None
        value.last_use = self.clock
        self._brought.append(weakref.ref(value))
        return value.tensor

    def drop(self, value: Value) -> None:
        """Keep a value no longer."""
        if value in self._kept:
            self._kept.discard(value)
            self.give_back(value)
            value.tensor = None
        self.changed(value)

    def leave_to_caller(self, value: Value, tensor: Tensor) -> None:
        """Note that the caller holds a value until the backward is over, so that to drop it would free nothing."""
        self.drop(value)
        if value.slots:  # otherwise no saved tensor says how long the caller has it
            value.tensor = tensor.detach()
            self.changed(value)

    def take(self, value: Value) -> None:
        """Count the bytes of a value that is there from now on."""
        self._num_bytes += value.num_bytes

    def give_back(self, value: Value) -> None:
        """Count them no longer."""
        self._num_bytes -= value.num_bytes

    def _keep(self, value: Value, tensor: Tensor) -> None:
        value.tensor = tensor.detach()
        self.changed(value)
        self._kept.add(value)
        self.take(value)

    def make_room(self, num_bytes: int, *, needed: Value | None = None) -> None:
        """Drop values until there is room for so many bytes besides, but not the one that is needed."""
        while self._num_bytes + num_bytes > self._limit:
            free = self.free(needed) or self.free(needed, held=True)
            if not free:
                raise self.no_room(num_bytes)
            self.drop(min(free, key=lambda value: (self.score(value), value.operator.number)))

    def free(self, needed: Value | None, *, held: bool = False) -> list[Value]:
        """The values that may be dropped, but for one that is needed; ``held``: with what a backward may hold now."""
        free = [value for value in self._kept if value not in self._uses and value is not needed]
        brought = () if held else {each() for each in self._brought}
        return [value for value in free if value not in brought]

    def no_room(self, num_bytes: int) -> NoRoomError:
        """The error that there is no room for so many bytes besides."""
        return NoRoomError(
            f"{self._num_bytes + num_bytes} bytes of saved tensors are needed at once, and memory_limit leaves "
            f"{self._limit} to them: give more memory, or use another activation_checkpoint"
        )

    def score(self, value: Value) -> float:
        """A value's score, of which the least is dropped."""
        return self._score(self, value)

    def cost_around(self, value: Value) -> float:
        """The cost of the operators that lead to a value, and of those that would need it and are not there.

        It is computed again only when something around the value has changed: a step asks for it many thousand times.
        """
        if value not in self._costs:
            operators = _leading_to(value) | _depending_on(value)
            self._costs[value] = sum(each.cost for each in sorted(operators, key=lambda each: each.number))
        return self._costs[value]

    def changed(self, value: Value) -> None:
        """Forget the costs around a value that was made, that is there now, or that is no longer."""
        self._costs.pop(value, None)
        for each in _around(value):
            self._costs.pop(each, None)

    def _make_again(self, target: Value) -> None:
        """Run the operators that lead to a value, and keep those values on the way that autograd has saved."""
        operators = sorted(_leading_to(target), key=lambda operator: operator.number)
        self._uses = Counter(value for operator in operators for value in operator.inputs)
        on_the_way: dict[Value, Tensor] = {}
        for operator in operators:
            self._run(operator, on_the_way, target)
        self._uses.clear()

    def _run(self, operator: Operator, on_the_way: dict[Value, Tensor], target: Value) -> None:
        inputs = operator.inputs
        self.make_room(operator.num_bytes, needed=target)
        made = operator.run({value: on_the_way[value] if value.tensor is None else value.tensor for value in inputs})
        self.clock += operator.cost
        for value, tensor in [(value, self._tensor_of(value, made, on_the_way)) for value in operator.made]:
            if value.tensor is None and (value is target or value.slots):
                self._keep(value, tensor)
            elif value.tensor is None and self._uses[value]:
                on_the_way[value] = tensor
                self.take(value)
        for value in inputs:
            self._uses[value] -= 1
            if self._uses[value]:
                continue
            del self._uses[value]
            if value in on_the_way:
                self._taken(value, on_the_way)

    def _tensor_of(self, value: Value, made: list[Tensor], on_the_way: dict[Value, Tensor]) -> Tensor:
        """What an operator that has run again has made, or changed, of a value."""
        if value.output is not None:
            return made[value.output]
        assert value.before is not None  # it is the change of another value
        return self._taken(value.before, on_the_way)

    def _taken(self, value: Value, on_the_way: dict[Value, Tensor]) -> Tensor:
        """The tensor of a value on the way, which is no longer counted."""
        self.give_back(value)
        return on_the_way.pop(value)

    def staleness(self, value: Value) -> float:
        """The cost of what has run since the last use of a value."""
        return max(self.clock - value.last_use, 1.0)


def _leading_to(value: Value) -> set[Operator]:
    """The operators that must run to make a value again, beginning with what is kept."""
    found: set[Operator] = set()
    waiting = [value.operator]
    while waiting:
        operator = waiting.pop()
        if operator not in found:
            found.add(operator)
            waiting += [each.operator for each in operator.inputs if each.tensor is None]
    return found


def _depending_on(value: Value) -> set[Operator]:
    """The operators whose results are not there and would need a value, directly or by others that are not there."""
    found: set[Operator] = set()
    waiting = value.users
    while waiting:
        operator = waiting.pop()
        if operator not in found:
            found.add(operator)
            waiting += [user for each in operator.made if each.tensor is None for user in each.users]
    return {each for each in found if any(made.tensor is None for made in each.made)}


def _around(value: Value) -> set[Value]:
    """The values of which :meth:`Pool.cost_around` depends on whether this one is there."""
    found: set[Value] = set()
    for beside in (_made_from, _made_of):
        waiting = [value]
        while waiting:
            new = [each for each in beside(waiting.pop()) if each not in found]
            found.update(new)
            waiting += [each for each in new if each.tensor is None]
    return found


def _made_from(value: Value) -> Iterator[Value]:
    """The values that operators make of a value."""
    for user in value.users:
        yield from user.made


def _made_of(value: Value) -> Iterator[Value]:
    """The values of which a value was made."""
    yield from value.operator.inputs


def _full(pool: Pool, value: Value) -> float:
    return pool.cost_around(value) / (max(1, value.num_bytes) * pool.staleness(value))


def _local(pool: Pool, value: Value) -> float:
    return value.operator.cost / (max(1, value.num_bytes) * pool.staleness(value))


_SCORES: dict[str, Callable[[Pool, Value], float]] = {
    "full": _full,
    "local": _local,
    "lru": lambda pool, value: 1.0 / pool.staleness(value),
    "size": lambda pool, value: 1.0 / max(1, value.num_bytes),
}
"""The scores of :data:`runner.memory.solve.graph.evicting.SCORES`, for values of operators."""
