"""Which linear layers of a traced program ranks can divide: columns, what their results pass through, and rows.

A group of products that read one value are taken for columns: each rank has some of their results' features. From there
the operators are followed in their order until every way ends in a product that sums over the divided features: a row,
whose results the ranks sum. Where a way ends otherwise, the products from which it came stay whole, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from runner.model.sharded.graph import Graph, operator
from runner.model.sharded.regions import Cut, Region, origins_of
from runner.model.sharded.splits import Conflict

__all__ = ["Found", "regions_of"]


@dataclass
class Found:
    """What can be divided in one program.

    Args:
        graph: the program.

    Attributes:
        regions: the regions, in the order of their first columns.
        taken: the region of each operator with divided operands or results.
        left: why each other product with a parameter stays whole.
    """

    graph: Graph
    regions: list[Region] = field(default_factory=list)
    taken: dict[Node, Region] = field(default_factory=dict)
    left: dict[Node, str] = field(default_factory=dict)

    @property
    def cuts(self) -> dict[str, Cut]:
        """How each divided parameter is divided, by name."""
        return {r.graph.parameters[node]: cut for r in self.regions for node, cut in r.cuts.items()}


def regions_of(graph: Graph, degree: int, kept: Mapping[str, str]) -> Found:
    """The regions of a program.

    Args:
        graph: the program.
        degree: number of ranks.
        kept: parameters that must stay whole, with the reasons.
    """
    found = Found(graph)
    for node, product in graph.products.items():
        if node in found.taken or node in found.left:
            continue
        base = graph.base(product.value)
        group = [
            each
            for each, other in graph.products.items()
            if graph.base(other.value) is base and each not in found.taken and each not in found.left
        ]
        region = _region(graph, degree, group, found, kept)
        if region is None:
            continue
        found.regions.append(region)
        found.taken |= dict.fromkeys((*region.splits, *region.rows), region)
    return found


def _region(graph: Graph, degree: int, group: list[Node], found: Found, kept: Mapping[str, str]) -> Region | None:
    """The largest region of these columns; the reasons of those that stay whole are noted."""
    attempt = _Attempt(found, dict.fromkeys(group, 1))
    while attempt.columns:
        region = Region(graph, degree, dict(attempt.columns), found.taken, kept)
        try:
            region.walk()
            _check_changes(region)
        except Conflict as conflict:
            attempt.adjust(region, conflict)
            continue
        near = _near(region)
        if len(near) == len(region.columns):
            return region
        attempt.columns = {node: pieces for node, pieces in region.columns.items() if node in near}
    return None


@dataclass
class _Attempt:
    """Columns that are changed until they make a region, or none are left.

    Attributes:
        found: what is known of other products; reasons are noted there.
        columns: the columns, with the number of pieces of each one's weight.
        notes: why a weight is cut into more pieces than one.
        joined: columns that read another value, which were added to the group because it meets what they make.
        refused: the ones among them that do not help.
    """

    found: Found
    columns: dict[Node, int]
    notes: dict[Node, str] = field(default_factory=dict)
    joined: set[Node] = field(default_factory=set)
    refused: dict[Node, str] = field(default_factory=dict)

    def adjust(self, region: Region, conflict: Conflict) -> None:
        """Change the columns so that the conflict does not arise again."""
        blamed = [node for node in self.columns if node in conflict.origins] or list(self.columns)
        if conflict.factor > 1 and all(self._fits(region, node, conflict.factor) for node in blamed):
            for node in blamed:
                self.columns[node] *= conflict.factor
                self.notes.setdefault(node, conflict.reason)
        elif conflict.operand is None or not self._join(region, conflict.operand):
            self._leave(region, conflict, blamed)

    def _fits(self, region: Region, node: Node, factor: int) -> bool:
        product = region.graph.products[node]
        features = region.graph.shape(product.weight)[product.out]
        return features % (self.columns[node] * factor * region.degree) == 0

    def _join(self, region: Region, operand: Node) -> bool:
        """Take the products that make a whole value for columns, too, if that is possible."""
        used = (self.columns, self.found.taken, self.found.left, self.refused)
        free = {node for node in region.graph.products if not any(node in each for each in used)}
        makers = _makers(region.graph, operand, free)
        self.columns.update(dict.fromkeys(makers, 1))
        self.joined.update(makers)
        for node in makers:
            for origin in _row_origins(region, node):
                self.columns.pop(origin, None)
                self.found.left[origin] = f"{node.name}, which reads it, is divided"
        return bool(makers)

    def _leave(self, region: Region, conflict: Conflict, blamed: list[Node]) -> None:
        """Leave columns whole. Those that have joined may still be columns of a region of their own."""
        reason, products = conflict.reason, region.graph.products
        left = self.found.left | self.refused
        cause = _cause(region.graph, conflict.operand, left) if conflict.operand is not None else None
        if cause is not None:
            name = region.graph.parameters[products[cause].weight]
            reason = f"it is read beside what {name} makes, which stays whole"
        for node in blamed:
            del self.columns[node]
            before = self.notes.get(node)
            said = reason if before in (None, reason) else f"{before}, and {reason}"
            (self.refused if node in self.joined else self.found.left)[node] = said


def _row_origins(region: Region, node: Node) -> frozenset[Node]:
    """The columns from which a row's operand comes, if it is a row."""
    return origins_of(region.splits[region.graph.products[node].value]) if node in region.rows else frozenset()


def _makers(graph: Graph, operand: Node, free: set[Node]) -> list[Node]:
    """The free products that make a whole value, if nothing else does that depends on weights or the input."""
    makers: dict[Node, None] = {}
    waiting, seen = [operand], {operand}
    while waiting:
        node = waiting.pop()
        if node not in graph.differentiable:
            continue
        if node in graph.products:
            if node not in free:
                return []
            makers[node] = None
            continue
        if node.op != "call_function" or operator(node) in ("aten::layer_norm", "aten::embedding"):
            return []
        waiting += [each for each in node.all_input_nodes if each not in seen]
        seen.update(node.all_input_nodes)
    return list(makers)


def _cause(graph: Graph, operand: Node, left: Mapping[Node, str]) -> Node | None:
    """The nearest product behind a whole value, if it is known why that one stays whole."""
    waiting, seen = [operand], {operand}
    while waiting:
        found = [node for node in waiting if node in graph.products]
        if found:
            return found[0] if found[0] in left else None
        waiting = [*dict.fromkeys(each for node in waiting for each in node.all_input_nodes if each not in seen)]
        seen.update(waiting)
    return None


def _near(region: Region) -> set[Node]:
    """The columns that meet the first one, or between which and the first one no product of another value lies.

    The others are left to a region of their own, because the model cannot be cut within a region.
    """
    positions, products = region.graph.positions, region.graph.products
    columns = sorted(region.columns, key=positions.__getitem__)
    meetings = {origins_of(splits) for splits in region.splits.values()}
    near = {columns[0]}
    while grown := {node for origins in meetings if origins & near for node in origins} - near:
        near |= grown
    bases = {region.graph.base(products[node].value) for node in near}
    for node in products:
        inside = node in region.splits or node in region.rows or region.graph.base(products[node].value) in bases
        if positions[node] > positions[columns[0]] and not inside:
            return near | {column for column in columns if positions[column] < positions[node]}
    return set(columns)


def _check_changes(region: Region) -> None:
    """Refuse readers that share an entry of a value that is changed in place before the last of them reads it."""
    graph = region.graph
    readers: dict[Node, list[Node]] = {}
    for node in region.columns:
        readers.setdefault(graph.base(graph.products[node].value), []).append(node)
    for node, operand in region.entered:
        readers.setdefault(graph.base(operand), []).append(node)
    for base, nodes in readers.items():
        start, end = graph.positions.get(base, -1), max(graph.positions[node] for node in nodes)
        if any(start < place < end for place in graph.changes.get(base, [])):
            raise Conflict(f"{base.name}, which it reads, is changed in place", frozenset(nodes))
