"""The cheapest order within a budget, as a mixed integer program.

There is a stage for each value, which computes it for the first time, or for several (:attr:`Graph.ends`). R[t, i] says
whether stage t computes value i, S[t, i] whether value i is kept from stage t - 1 to stage t, FREE[t, i, k] whether
value i is dropped in stage t after value k, and U[t, k] is the memory in bytes after value k.

Source: Jain et al. 2020, Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization. FREE has the term
of a value that is dropped right after it was computed. The publication adds all reasons not to drop a value in one row,
under which only a whole number is right; a row for each reason makes FREE whole wherever R and S are.

A graph may have optional runs that give the results of others, from values that are kept for them. That is how monet
chooses what each layer keeps, in the same program; see :class:`.values.Value`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from runner.memory.solve.graph.values import Graph, Order, kept_bytes, replayed
from runner.noise import silent_output

__all__ = ["cheapest_order", "order_of_kept"]

_Key = tuple[str, int, int, int]
_Terms = Iterable[tuple[float, _Key]]

_ROUNDING = 1e-6  # by which the solver's sums may differ, relative to them
_MOST_SUMS = 1_000_000  # of seconds, beyond which no bound is raised to the next sum


def cheapest_order(
    graph: Graph,
    budget: int,
    *,
    seconds: float = 60.0,
    gap: float = 0.0,
    nodes: int | None = None,
    in_flight: int = 1,
    known: Sequence[Order] = (),
) -> Order | None:
    """The order with the least seconds of computation within a budget; None if none was found.

    If there are no optional runs, the relaxed program is solved first. It takes a fraction of the time, and bounds what
    the orders of this program take. If an order that follows from it by rounding, or one that is known, is as near that
    bound as is asked, it is the result, and nothing else is solved.

    Args:
        graph: the graph.
        budget: the most bytes of values that are alive at once.
        seconds: time limit of the solver, for each of the two programs.
        gap: how far the result may be from the optimum, relative to it.
        nodes: limit of the solver's search tree, with which the result does not depend on the machine's speed; None =
            no limit.
        in_flight: how many times what is kept from the first stage to the second takes memory, if others run
            as many first stages before they go on.
        known: orders that others found, as of lower sets. The result is never dearer than one that is within the
            budget.
    """
    model = _Model(graph, budget, in_flight)
    # No order that is rounded uses an optional run, so that a graph that has some is asked for whole numbers at once.
    relaxed = None if graph.instead else model.solved(whole_numbers=False, seconds=seconds, gap=0.0)
    bound = 0.0 if relaxed is None else _reachable(graph, model.seconds(relaxed))
    rounded = [] if relaxed is None else _rounded(graph, model, relaxed)
    quick = _cheapest(graph, budget, [*known, *rounded], in_flight)
    if quick is not None and quick[0] <= bound * (1 + max(gap, _ROUNDING)):
        return quick[1]
    found = model.solved(whole_numbers=True, seconds=seconds, gap=gap, nodes=nodes)
    whole = [] if found is None else [order_of_kept(graph, model.kept(found, 0.5), model.run(found))]
    best = min(filter(None, [quick, _cheapest(graph, budget, whole, in_flight)]), default=None)
    return None if best is None else best[1]


def _reachable(graph: Graph, bound: float) -> float:
    """The least seconds that an order can take at or above a bound, as whole values are computed again.

    Where layers are equal, this is far above the bound of a relaxed program, which computes parts of them.
    """
    once = sum(graph.values[index].seconds for index in graph.once)
    times: dict[float, int] = {}  # seconds of values -> how often such values may be computed again, in all stages
    for stage, own in enumerate(graph.stages):
        for index in own:
            if index not in graph.backwards and (seconds := graph.values[index].seconds):
                times[seconds] = times.get(seconds, 0) + len(graph.stages) - 1 - stage
    sums = np.array([once])
    for seconds, most in times.items():
        again = np.arange(min(most, ceil((bound - once) / seconds)) + 1) if bound > once else np.zeros(1)
        if len(sums) * len(again) > _MOST_SUMS:
            return bound
        sums = (sums[:, None] + seconds * again).ravel()
    above = sums[sums >= bound * (1 - _ROUNDING)]
    return max(bound, float(above.min())) if len(above) else bound


def _rounded(graph: Graph, model: _Model, relaxed: np.ndarray) -> list[Order]:
    """The orders that follow from a relaxed program if what is kept is rounded."""
    return [order_of_kept(graph, model.kept(relaxed, tenths / 10)) for tenths in range(1, 10)]


def _cheapest(graph: Graph, budget: int, orders: Iterable[Order], in_flight: int) -> tuple[float, Order] | None:
    """The seconds of the cheapest order within a budget, and that order; None if no order is within it."""
    found = []
    for order in orders:
        cost = replayed(graph, order)
        besides = (in_flight - 1) * kept_bytes(graph, order) if in_flight > 1 else 0
        if cost.peak_bytes + besides <= budget:
            found.append((cost.seconds, order))
    return min(found, default=None)


def _never(stage: int, index: int) -> bool:
    return False


def order_of_kept(graph: Graph, kept: Callable[[int, int], bool], run: Callable[[int, int], bool] = _never) -> Order:
    """The order in which each stage computes only what it must, if it is known what is kept.

    Args:
        graph: the graph.
        kept: whether a value, the second argument, is kept from the stage before to a stage, the first argument.
        run: whether an optional run, the second argument, is used in a stage, the first argument.
    """
    order: list[int] = []
    for stage, own in enumerate(graph.stages):
        there = _kept_for(graph, stage, kept)
        computed = {index for index in own if not graph.values[index].is_optional}
        if stage + 1 < len(graph.stages):
            computed |= _kept_for(graph, stage + 1, kept) - there
        chosen = {each: other for other, each in graph.instead.items() if run(stage, other)}
        for index in range(own.stop - 1, -1, -1):
            if index in computed:
                needs = graph.values[index].needs
                if not graph.values[index].is_run and not graph.values[index].is_optional:
                    needs = tuple(chosen.get(need, need) for need in needs)
                computed |= set(needs) - there
        order += sorted(computed | _made_again(graph, stage, computed, there, kept))
    return tuple(order)


def _made_again(
    graph: Graph, stage: int, computed: set[int], there: set[int], kept: Callable[[int, int], bool]
) -> set[int]:
    """What is there, is used further on, and is the result of a run that a stage computes again.

    A run makes all its results. They take the place of what is there, which need not be kept until then. A run that
    has optional ones beside it is left out: those are not given all from which the results follow.
    """
    used = {need for index in computed for need in graph.values[index].needs}
    if stage + 1 < len(graph.stages):
        used |= _kept_for(graph, stage + 1, kept)
    return {
        index
        for index in there & used - computed
        if any(_is_only_run(graph, need) for need in computed.intersection(graph.values[index].needs))
        and not graph.values[index].seconds
    }


def _is_only_run(graph: Graph, index: int) -> bool:
    return graph.values[index].is_run and index not in graph.others


def _kept_for(graph: Graph, stage: int, kept: Callable[[int, int], bool]) -> set[int]:
    """The values that are there when a stage begins: backwards, which run once, until their last use."""
    start = graph.stages[stage].start
    return {
        index
        for index in range(start)
        if (graph.users[index][-1:] >= (start,) if index in graph.backwards else kept(stage, index))
        and not graph.values[index].is_run
    }


@dataclass
class _Rows:
    """Rows of a sparse matrix: low <= sum of coefficients by variables <= high."""

    columns: dict[_Key, int]
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: _Terms, low: float, high: float) -> None:
        """Add a row."""
        row = len(self.low)
        self.entries += [(row, self.columns[key], factor) for factor, key in terms]
        self.low.append(low)
        self.high.append(high)


class _Model:
    """The program of a graph and a budget. Memory is counted in budgets, so that numbers are near one."""

    def __init__(self, graph: Graph, budget: int, in_flight: int = 1) -> None:
        self._graph, self._others = graph, in_flight - 1
        self._size = [value.num_bytes / max(1, budget) for value in graph.values]
        self._columns: dict[_Key, int] = {}
        for stage in range(len(graph.stages)):
            self._declare(stage)
        self._rows = _Rows(self._columns)
        for stage in range(len(graph.stages)):
            self._follow(stage)
            self._drop(stage)
            self._count(stage, max(1, budget))

    def solved(self, *, whole_numbers: bool, seconds: float, gap: float, nodes: int | None = None) -> np.ndarray | None:
        """The values of the variables, or None if none were found."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        count, rows = len(self._columns), self._rows
        at, columns, factors = zip(*rows.entries, strict=True)
        matrix = csr_array((factors, (at, columns)), shape=(len(rows.low), count))
        cost, low, high, whole = np.zeros(count), np.zeros(count), np.ones(count), np.zeros(count)
        for (kind, stage, index, _), column in self._columns.items():
            whole[column] = whole_numbers and kind in ("R", "S")
            if kind == "R":
                cost[column] = self._graph.values[index].seconds
                low[column], high[column] = self._bounds(stage, index)
            elif kind == "S" and self._graph.values[index].is_run:
                high[column] = 0.0
        limits = {"time_limit": seconds, "mip_rel_gap": gap, **({} if nodes is None else {"node_limit": nodes})}
        with silent_output():
            found = milp(
                cost,
                integrality=whole,
                bounds=Bounds(low, high),
                constraints=LinearConstraint(matrix, rows.low, rows.high),
                options=limits,
            )
        return None if found.x is None else np.asarray(found.x)

    def seconds(self, found: np.ndarray) -> float:
        """The seconds of all computations, by a solution."""
        values = self._graph.values
        return sum(values[key[2]].seconds * float(found[at]) for key, at in self._columns.items() if key[0] == "R")

    def kept(self, found: np.ndarray, threshold: float) -> Callable[[int, int], bool]:
        """Whether a value is kept for a stage, by a solution."""
        return lambda stage, index: bool(found[self._columns["S", stage, index, 0]] >= threshold)

    def run(self, found: np.ndarray) -> Callable[[int, int], bool]:
        """Whether an optional run is used in a stage, by a solution."""
        return lambda stage, index: (
            ("R", stage, index, 0) in self._columns and bool(found[self._columns["R", stage, index, 0]] >= 0.5)
        )

    def _bounds(self, stage: int, index: int) -> tuple[float, float]:
        """Whether a stage must compute a value, and whether it may; the backward of a layer runs once."""
        value, is_own = self._graph.values[index], index in self._graph.stages[stage]
        if not value.is_optional:
            return float(is_own), float(is_own or index not in self._graph.backwards)
        return 0.0, float(is_own != value.is_run)

    def _declare(self, stage: int) -> None:
        own = self._graph.stages[stage]
        keys: list[_Key] = [("R", stage, index, 0) for index in range(own.stop)]
        keys += [("S", stage, index, 0) for index in range(own.start)]
        keys += [("U", stage, index, 0) for index in range(own.stop)]
        keys += [("FREE", stage, need, index) for index in range(own.stop) for need in self._near(index)]
        for key in keys:
            self._columns[key] = len(self._columns)

    def _near(self, index: int) -> tuple[int, ...]:
        """The values that may be dropped after a value: those from which it is computed, and itself."""
        return tuple(each for each in (*self._graph.values[index].needs, index) if self._size[each])

    def _follow(self, stage: int) -> None:
        """What is computed needs what is computed or kept; what is kept was computed or kept before."""
        for run, others in self._graph.others.items():
            if run in self._graph.stages[stage] and len(others) > 1:  # one of them at most has what it needs
                left = {need for other in others for need in self._graph.values[other].needs}
                optional = (need for need in left if self._graph.values[need].is_optional)
                self._rows.add([(1.0, ("R", stage, need, 0)) for need in sorted(optional)], -np.inf, 1.0)
        for index in range(self._graph.stages[stage].stop):
            value = self._graph.values[index]
            for need in value.needs:
                others = () if value.is_optional else self._graph.others.get(need, ())
                there = [*self._there(stage, need), *((-1.0, ("R", stage, other, 0)) for other in others)]
                self._rows.add([(1.0, ("R", stage, index, 0)), *there], -np.inf, 0.0)
                if value.is_optional and self._graph.values[need].is_optional and stage + 1 < len(self._graph.stages):
                    self._rows.add([(1.0, ("R", stage, index, 0)), (1.0, ("S", stage + 1, need, 0))], -np.inf, 1.0)
            if stage + 1 < len(self._graph.stages):
                self._rows.add([(1.0, ("S", stage + 1, index, 0)), *self._there(stage, index)], -np.inf, 0.0)

    def _there(self, stage: int, index: int) -> list[tuple[float, _Key]]:
        """Minus one for each way in which a value comes to be there in a stage."""
        kept: list[tuple[float, _Key]] = [(-1.0, ("S", stage, index, 0))]
        return [(-1.0, ("R", stage, index, 0)), *(kept if index < self._graph.stages[stage].start else [])]

    def _drop(self, stage: int) -> None:
        """A value may be dropped after another one that is computed, if no later one needs it and it is not kept.

        A row for each reason, and that a value that is there is dropped at most once, or kept: both bound the relaxed
        program closely, and with the first FREE needs not be declared a whole number.
        """
        stop = self._graph.stages[stage].stop
        goes_on = stage + 1 < len(self._graph.stages)
        left: dict[int, list[tuple[float, _Key]]] = {}
        for index in range(stop):
            for each in self._near(index):
                free = (1.0, ("FREE", stage, each, index))
                left.setdefault(each, [(1.0, ("S", stage + 1, each, 0))] if goes_on else []).append(free)
                self._rows.add([free, (-1.0, ("R", stage, index, 0))], -np.inf, 0.0)
                reasons = [("R", stage, user, 0) for user in self._graph.users[each] if index < user < stop]
                for reason in [*reasons, ("S", stage + 1, each, 0)] if goes_on else reasons:
                    self._rows.add([free, (1.0, reason)], -np.inf, 1.0)
        for each, ways in left.items():
            self._rows.add([*ways, *self._there(stage, each)], -np.inf, 0.0)

    def _count(self, stage: int, budget: int) -> None:
        """The memory after each value of a stage, and while it is computed."""
        own = self._graph.stages[stage]
        first: list[tuple[float, _Key]] = [(1.0, ("U", stage, 0, 0)), (-self._size[0], ("R", stage, 0, 0))]
        self._rows.add([*first, *((-self._size[i], ("S", stage, i, 0)) for i in range(own.start))], 0.0, 0.0)
        stashes = self._stashes_of_others()
        for index in range(own.stop):
            besides = self._graph.values[index].transient_bytes / budget
            if besides or stashes:
                running = [(1.0, ("U", stage, index, 0)), (besides, ("R", stage, index, 0))]
                self._rows.add([*running, *stashes], -np.inf, 1.0)
        for index in range(own.stop - 1):
            dropped = [(self._size[each], ("FREE", stage, each, index)) for each in self._near(index)]
            now, next_ = (-1.0, ("U", stage, index, 0)), (1.0, ("U", stage, index + 1, 0))
            made = (-self._size[index + 1], ("R", stage, index + 1, 0))
            self._rows.add([next_, now, made, *dropped], 0.0, 0.0)

    def _stashes_of_others(self) -> list[tuple[float, _Key]]:
        """What others in flight keep from their first stage."""
        if not self._others:
            return []
        return [(self._others * self._size[i], ("S", 1, i, 0)) for i in self._graph.stages[0] if self._size[i]]
