"""The topology of a run: a frozen table of seats ``(row, stage, replica, shard) -> rank``.

A grid of pipeline x data x tensor degrees is one way to construct the table. Replicated stages, twins of bidirectional
pipelines and parallel pipelines are other tables of the same kind, so code that needs "the ranks that hold this stage"
never computes them from degrees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Coordinates", "Seat", "Topology"]


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """One copy of one stage on one rank.

    Args:
        row: the pipeline of the seat; 0 unless several pipelines cross the same ranks.
        stage: global stage index within the row.
        replica: index along the data axis.
        shard: index along the tensor axis.
        rank: global rank that holds it.
    """

    row: int
    stage: int
    replica: int
    shard: int
    rank: int


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The place of a rank: position in its pipeline, replica, shard."""

    pipe: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Topology:
    """All seats of a run. Ranks are 0 .. world_size - 1, and each has at least one seat.

    Raises:
        ValueError: if a seat is given twice or the ranks are not 0 .. world_size - 1.
    """

    seats: tuple[Seat, ...]
    _by_rank: tuple[tuple[Seat, ...], ...] = field(init=False, repr=False, compare=False)
    _by_place: dict[tuple[int, int, int, int], int] = field(init=False, repr=False, compare=False)
    _groups: dict[tuple[int, int], tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _positions: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_place = {(seat.row, seat.stage, seat.replica, seat.shard): seat.rank for seat in self.seats}
        if len(by_place) != len(self.seats):
            raise ValueError("a seat (row, stage, replica, shard) is given twice")
        by_rank: defaultdict[int, list[Seat]] = defaultdict(list)
        groups: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        for seat in self.seats:
            by_rank[seat.rank].append(seat)
            groups[seat.replica, seat.shard].add(seat.rank)
        if sorted(by_rank) != list(range(len(by_rank))):
            raise ValueError(f"ranks must be 0 .. world size - 1 without gaps, got {sorted(by_rank)}")
        object.__setattr__(self, "_by_place", by_place)
        object.__setattr__(self, "_by_rank", tuple(tuple(sorted(by_rank[rank])) for rank in range(len(by_rank))))
        object.__setattr__(self, "_groups", {key: tuple(sorted(ranks)) for key, ranks in groups.items()})
        positions = {rank: at for group in self._groups.values() for at, rank in enumerate(group)}
        object.__setattr__(self, "_positions", positions)

    @classmethod
    def grid(
        cls,
        pipeline: int,
        data: int,
        tensor: int = 1,
        *,
        placement: Sequence[Sequence[int]] | None = None,
        pipeline_inside: bool = False,
    ) -> Topology:
        """Make the topology of pipelines of equal shape: ``rank = (pipe * data + d) * tensor + t``.

        Args:
            pipeline, data, tensor: degrees, each at least 1.
            placement: rows of stage -> pipe position, as in a Schedule; default: one row with stage s on position s.
            pipeline_inside: whether neighbours are the positions of a replica instead, ``rank = (d * pipeline + pipe) *
                tensor + t``.

        Raises:
            ValueError: if a degree is below 1, or the placement does not use exactly the pipe positions.
        """
        if min(pipeline, data, tensor) < 1:
            raise ValueError(f"degrees must be at least 1, got {pipeline}, {data}, {tensor}")
        rows = placement if placement is not None else (tuple(range(pipeline)),)
        if {position for row in rows for position in row} != set(range(pipeline)):
            raise ValueError(f"the placement must use the pipe positions 0 .. {pipeline - 1}, all of them")
        outer, inner = (1, pipeline) if pipeline_inside else (data, 1)
        return cls(
            tuple(
                Seat(row, stage, d, t, (position * outer + d * inner) * tensor + t)
                for row, positions in enumerate(rows)
                for stage, position in enumerate(positions)
                for d in range(data)
                for t in range(tensor)
            )
        )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._by_rank)

    @property
    def num_replicas(self) -> int:
        """The number of copies along the data axis."""
        return 1 + max(seat.replica for seat in self.seats)

    @property
    def num_stages(self) -> int:
        """The number of stages of the longest row."""
        return 1 + max(seat.stage for seat in self.seats)

    @property
    def num_positions(self) -> int:
        """The number of pipe positions, which is the same in all replicas and shards."""
        return 1 + max(self._positions.values())

    def rank_of(self, stage: int, replica: int, shard: int, *, row: int) -> int:
        """The rank in this seat; raises KeyError if there is no such seat."""
        return self._by_place[row, stage, replica, shard]

    def seats_of(self, rank: int) -> tuple[Seat, ...]:
        """The seats of a rank, in order of row and stage."""
        return self._by_rank[rank]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank in ascending order; each comes once, even if two rows cross."""
        return tuple(sorted({seat.stage for seat in self._by_rank[rank]}))

    def coordinates(self, rank: int) -> Coordinates:
        """The pipe position, replica and shard of a rank."""
        seat = self._by_rank[rank][0]
        return Coordinates(self._positions[rank], seat.replica, seat.shard)

    def pipeline_group(self, replica: int, shard: int) -> tuple[int, ...]:
        """The ranks of one replica's pipeline, in order of pipe position."""
        return self._groups[replica, shard]

    def data_group(self, pipe: int, shard: int) -> tuple[int, ...]:
        """The ranks at one pipe position, in order of replica; they hold the same stages."""
        replicas = sorted(replica for replica, other in self._groups if other == shard)
        return tuple(self._groups[replica, shard][pipe] for replica in replicas)

    @property
    def num_shards(self) -> int:
        """The number of ranks that divide each layer among them."""
        return 1 + max(seat.shard for seat in self.seats)

    def tensor_group(self, pipe: int, replica: int) -> tuple[int, ...]:
        """The ranks at one pipe position of a replica, in order of shard; they divide the same layers among them."""
        return tuple(self._groups[replica, shard][pipe] for shard in range(self.num_shards))

    def model_group(self, replica: int) -> tuple[int, ...]:
        """The ranks of a replica, of all pipe positions and shards, ascending."""
        return _distinct(rank for (each, _), ranks in self._groups.items() if each == replica for rank in ranks)

    def peers(self, pipe: int) -> tuple[int, ...]:
        """The ranks at one pipe position, of all replicas and shards, ascending."""
        return _distinct(ranks[pipe] for ranks in self._groups.values())

    def holders(self, stage: int, shard: int) -> tuple[int, ...]:
        """All ranks with this shard of a stage, in any row or replica; its gradients are summed over them."""
        return _distinct(seat.rank for seat in self.seats if seat.stage == stage and seat.shard == shard)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The ranks with a stage just before or after a stage of this rank, in the same row, replica and shard."""
        found = (
            self._by_place.get((seat.row, seat.stage + step, seat.replica, seat.shard))
            for seat in self._by_rank[rank]
            for step in (-1, 1)
        )
        return _distinct(other for other in found if other is not None and other != rank)


def _distinct(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks)))
