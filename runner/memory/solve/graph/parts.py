"""The orders of a stage that follow from those of its parts, each of few consecutive layers, which are solved alone.

A part is a stage by itself. What it gives to later parts is kept from its forward until their backwards, so that what
runs again within a part needs nothing of the others: the backward of the stage is that of one part after the other. Of
a part's order two numbers matter to the others: what it keeps from its forward to its backward, and its peak above what
earlier parts keep. A dynamic program over the parts finds the cheapest choice for each pair of both.

Source: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont 2023, Rockmate: an Efficient, Fast, Automatic and Generic Tool
for Re-materialization in PyTorch, which puts programs of blocks together so, within persistent schedules.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from runner.memory.solve.graph.stage import StageGraph
from runner.memory.solve.graph.values import Order, kept_bytes, replayed

__all__ = ["Part", "orders_of_parts"]

_UNITS = 200  # into which the memory of the stage is divided where choices are compared


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers of a stage.

    Args:
        stage: these layers as a stage by themselves, which others follow, but for the last part.
        orders: its orders; each runs every layer once before the first backward.
    """

    stage: StageGraph
    orders: Sequence[Order]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """An order for each of the first parts: seconds of all computations, and bytes kept and at the peak."""

    seconds: float
    kept: int
    peak: int
    orders: tuple[Order, ...] = ()


def orders_of_parts(stage: StageGraph, parts: Sequence[Part], in_flight: int, budgets: int) -> Iterator[Order]:
    """The fastest order of a stage at each of some limits, evenly from the most memory that orders take to the least.

    Args:
        stage: the stage.
        parts: its parts, from the first layers to the last.
        in_flight: the most micro-batches whose saved tensors are alive at once.
        budgets: the number of limits.
    """
    chosen = sorted(_chosen(stage, parts), key=lambda each: each.seconds)
    memory = [(in_flight - 1) * each.kept + each.peak for each in chosen]
    least, more = min(memory), max(memory) - min(memory)
    limits = (least + more * number // (budgets - 1) for number in range(budgets - 1, -1, -1))
    for at in dict.fromkeys(next(at for at, needs in enumerate(memory) if needs <= limit) for limit in limits):
        yield _composed(stage, parts, chosen[at].orders)


def _chosen(stage: StageGraph, parts: Sequence[Part]) -> list[_Chosen]:
    unit = 1 + replayed(stage.graph, stage.graph.once).peak_bytes // _UNITS
    found = [_Chosen(0.0, 0, 0)]
    for part in parts:
        passed = _passed_on(stage, part)
        best: dict[tuple[int, int], _Chosen] = {}
        ways = [
            (*replayed(part.stage.graph, order), kept_bytes(part.stage.graph, order), order) for order in part.orders
        ]
        for before in found:
            for seconds, peak, kept, order in ways:
                chosen = _Chosen(
                    before.seconds + seconds,
                    before.kept + passed + kept,
                    max(before.peak, before.kept + passed + peak),
                    (*before.orders, order),
                )
                place = chosen.kept // unit, chosen.peak // unit
                if place not in best or chosen.seconds < best[place].seconds:
                    best[place] = chosen
        found = _undominated(best.values())
    return found


def _undominated(chosen: Iterable[_Chosen]) -> list[_Chosen]:
    """Those of which no other one takes as little time, keeps as little and has as low a peak."""
    found: list[_Chosen] = []
    for each in sorted(chosen, key=lambda each: (each.seconds, each.kept, each.peak)):
        if not any(other.kept <= each.kept and other.peak <= each.peak for other in found):
            found.append(each)
    return found


def _passed_on(stage: StageGraph, part: Part) -> int:
    """The bytes of tensors that a part makes for later ones."""
    layers = range(part.stage.first - stage.first, part.stage.last - stage.first + 1)
    own = set(part.stage.storages.values())
    return sum(
        stage.graph.values[index].num_bytes
        for index, storage in stage.storages.items()
        if stage.layers[index] in layers and storage not in own
    )


def _composed(stage: StageGraph, parts: Sequence[Part], orders: Sequence[Order]) -> Order:
    """The order of a stage that runs its parts forward and then backward, each by its own order."""
    places = {name: index for index, name in _names(stage)}
    first = {index for index in range(stage.num_forward) if not stage.graph.values[index].is_optional}
    backward: list[int] = []
    for part, order in zip(parts, orders, strict=True):
        here = {index: places[name] for index, name in _names(part.stage)}
        end = 1 + order.index(part.stage.num_forward - 1)
        first |= {here[index] for index in order[:end]}
        again = [here[index] for index in order[end:] if index in here]
        backward = [*_with_results(stage, again, set(here.values())), *backward]
    return (*sorted(first), *backward)


def _with_results(stage: StageGraph, order: Sequence[int], known: set[int]) -> Iterator[int]:
    """An order with those results of its runs that its part does not count: they take the place of what is there."""
    for position, index in enumerate(order):
        yield index
        if stage.graph.values[index].is_run:
            later = set(order[position + 1 :])
            made = (user for user in stage.graph.users[stage.graph.instead.get(index, index)] if user not in known)
            yield from (each for each in made if each in stage.storages and later.intersection(stage.graph.users[each]))


def _names(stage: StageGraph) -> Iterator[tuple[int, Hashable]]:
    """The values of a stage that its own layers make, with names that are the same in every stage that has them."""
    for index, value in enumerate(stage.graph.values):
        layer = stage.first + stage.layers[index]
        if index in stage.storages:
            yield index, stage.storages[index]
        elif stage.graph.backward.get(index) != index:  # which is the gradient that a part is given
            yield index, (layer, stage.presets.get(index), value.is_run, index >= stage.num_forward)
