"""In which order loads leave for the host's memory and come back, and what waits for what.

A load is what one layer moves of one micro-batch. The policy is here alone, and three drivers follow it: with tensors
(:mod:`runner.memory.apply.mover`, :mod:`runner.memory.apply.trip`), with moments of a link that is played
(:mod:`runner.schedule.simulation.host_link`), and with bytes (:mod:`runner.plan.stages.on_the_way`). A load on its way
out counts until another one needs its room, or one that was sent after it is used again, and not until its copy ends:
so what the device holds does not depend on the link's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from typing import Generic, TypeVar

__all__ = ["Leaving", "Returning"]

Load = TypeVar("Load")
Key = TypeVar("Key", bound=Hashable)


class Leaving(Generic[Load]):
    """Loads on their way out, in the order in which they were sent.

    Args:
        room: the most bytes on their way at once; what is larger goes alone.
    """

    def __init__(self, room: float) -> None:
        self._room = room
        self._loads: list[tuple[Load, float]] = []

    def __iter__(self) -> Iterator[Load]:
        return (load for load, _ in self._loads)

    def make_room(self, num_bytes: float, *, one_by_one: bool = False) -> Iterator[Load]:
        """Take off, first sent first, what must have left before a load can be sent.

        Args:
            num_bytes: the load's size.
            one_by_one: whether it goes alone.
        """
        while self._loads and (one_by_one or sum(size for _, size in self._loads) + num_bytes > self._room):
            yield self._loads.pop(0)[0]

    def send(self, load: Load, num_bytes: float) -> None:
        """Note a load that is sent, for which there is room."""
        self._loads.append((load, num_bytes))

    def until(self, is_it: Callable[[Load], bool]) -> Iterator[Load]:
        """Take off a load and what was sent before it; nothing if there is no such load."""
        while any(is_it(load) for load in self):
            yield self._loads.pop(0)[0]


class Returning(Generic[Key]):
    """Loads of one stage and micro-batch that come back, the last one first, ahead of their use.

    No more than the largest load has is there unused, but at least what is used next.

    Args:
        sizes: the bytes of each load, in the order in which they were sent.
        one_by_one: the loads that wait until all that came back before has been used.
    """

    def __init__(self, sizes: Mapping[Key, float], one_by_one: Container[Key] = ()) -> None:
        self._sizes, self._one_by_one = sizes, one_by_one
        self._room = max(sizes.values(), default=0.0)
        self._away = list(sizes)
        self._unused: list[Key] = []

    def ahead(self, *, all_at_once: bool = False) -> Iterator[Key]:
        """What is to be fetched now.

        Args:
            all_at_once: whether everything is.
        """
        while self._away:
            load, unused = self._away[-1], sum(self._sizes[each] for each in self._unused)
            waits = load in self._one_by_one or unused + self._sizes[load] > self._room
            if self._unused and waits and not all_at_once:
                return
            self._unused.append(self._away.pop())
            yield load

    def is_away(self, load: Key) -> bool:
        """Whether a load has not been fetched."""
        return load in self._away

    def use(self, load: Key) -> bool:
        """Note that a load is used, which is fetched now if it is away; return whether this is its first use."""
        for among in (self._away, self._unused):
            if load in among:
                among.remove(load)
                return True
        return False
