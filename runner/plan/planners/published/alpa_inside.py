"""The intra-operator level of Alpa: how each operator of a stage is split over the devices of its mesh.

One split is chosen for each node of a graph. It has seconds and bytes; an edge whose ends are split differently takes
seconds to rearrange the tensor; the bytes of all nodes must fit. The linear program is solved first, because most such
programs have a whole solution, and with whole numbers only where it has none.

Source: Zheng et al. 2022, Alpa (section 4.2), whose bytes are alive all at once here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from runner.schedule.simulation.batched import Numbers

__all__ = ["fastest_on_chain", "least"]

_WHOLE = 1e-6

Rows = Sequence[Sequence[float]]
"""A figure of each node in each of its splits; or the seconds of an edge by the splits of its first and second end."""


def least(
    seconds: Rows, sizes: Rows, edges: Mapping[tuple[int, int], Rows], limit: float
) -> tuple[float, tuple[int, ...]] | None:
    """The least seconds of a graph whose bytes fit, and the split of each node; None if nothing fits.

    Args:
        seconds: what each node takes, by its splits.
        sizes: the bytes of each node, by its splits.
        edges: what each edge takes, by the splits of its ends, in seconds.
        limit: the bytes that there are.
    """
    if sum(map(min, sizes)) > limit:
        return None
    found = _solved(seconds, sizes, edges, limit, whole=False)
    if found is None or any(_WHOLE < value < 1 - _WHOLE for value in found):
        found = _solved(seconds, sizes, edges, limit, whole=True)
    if found is None:
        return None
    splits, at = list[int](), 0
    for own in seconds:
        splits.append(int(np.argmax(found[at : at + len(own)])))
        at += len(own)
    return _total(seconds, edges, splits), tuple(splits)


def fastest_on_chain(seconds: Rows, edges: Sequence[Rows]) -> tuple[float, tuple[int, ...]]:
    """The same for a chain, whose bytes are not asked for; an edge for each node but the last."""
    best: list[tuple[float, tuple[int, ...]]] = [(each, (split,)) for split, each in enumerate(seconds[0])]
    for own, edge in zip(seconds[1:], edges, strict=True):
        best = [
            min((before + edge[old][new] + each, (*splits, new)) for old, (before, splits) in enumerate(best))
            for new, each in enumerate(own)
        ]
    return min(best)


def _total(seconds: Rows, edges: Mapping[tuple[int, int], Rows], splits: Sequence[int]) -> float:
    own = sum(each[split] for each, split in zip(seconds, splits, strict=True))
    return own + sum(edge[splits[one]][splits[other]] for (one, other), edge in edges.items())


def _solved(
    seconds: Rows, sizes: Rows, edges: Mapping[tuple[int, int], Rows], limit: float, *, whole: bool
) -> Numbers | None:
    """The values of the program's variables, those of the nodes first; None if it has no solution."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    begins = [0, *np.cumsum([len(own) for own in seconds]).tolist()]
    cost = [each for own in seconds for each in own]
    nodes = len(cost)
    entries = list[tuple[int, int, float]]()  # row, column, factor
    low, high = list[float](), list[float]()

    def row(columns: Sequence[int], factors: Sequence[float], least: float, most: float) -> None:
        entries.extend((len(low), column, factor) for column, factor in zip(columns, factors, strict=True))
        low.append(least)
        high.append(most)

    for first, end in zip(begins, begins[1:], strict=False):
        row(range(first, end), [1.0] * (end - first), 1.0, 1.0)  # one split for each node
    row(range(nodes), [each / limit for own in sizes for each in own], -np.inf, 1.0)
    for (one, other), edge in edges.items():
        begin = len(cost)
        cost += [each for own in edge for each in own]
        wide = len(edge[0])
        for split in range(len(edge)):  # an edge has the splits of its ends
            columns = range(begin + split * wide, begin + (split + 1) * wide)
            row([*columns, begins[one] + split], [1.0] * wide + [-1.0], 0.0, 0.0)
        for split in range(wide):
            columns = range(begin + split, len(cost), wide)
            row([*columns, begins[other] + split], [1.0] * len(edge) + [-1.0], 0.0, 0.0)
    at, columns_of, factors = zip(*entries, strict=True)
    matrix = csr_array((factors, (at, columns_of)), shape=(len(low), len(cost)))
    integrality = np.zeros(len(cost))
    integrality[:nodes] = whole
    found = milp(
        cost,
        integrality=integrality,
        bounds=Bounds(0.0, 1.0),
        constraints=LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.0},
    )
    return None if found.x is None else np.asarray(found.x)
