"""Everything that one rank moves between its device and the host's memory: what stages save, and weights."""

from __future__ import annotations

from runner.engine.context import RankContext
from runner.engine.work import Work
from runner.engine.works.offloaded import Offloaded
from runner.engine.works.swapped import Swapped
from runner.memory.apply.install import StageOffload
from runner.memory.apply.weight_swap import WeightSwap

__all__ = ["HostMoves"]


class HostMoves:
    """The moves of one rank; without movers there are none.

    Args:
        offload: moves what stages save; None: it stays on the device.
        swap: lends the device the weights that are at home in the host's memory; None: all weights stay on the device.
    """

    def __init__(self, offload: StageOffload | None, swap: WeightSwap | None) -> None:
        self._mover = offload.mover if offload is not None else None
        self._offload, self._swap = offload, swap

    def works(self, rank: RankContext) -> list[Work]:
        """The additions to forwards and backwards that move."""
        works: list[Work] = []
        if self._offload is not None:
            works.append(Offloaded(rank, self._offload))
        if self._swap is not None:
            works.append(Swapped(self._swap))
        return works

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes of activations that have gone to the host and come back, of weights that have come from it, and of
        their gradients that have gone to it."""
        swap = self._swap
        return {
            "host_activations": self._mover.bytes_moved if self._mover is not None else 0,
            "host_weights": swap.weights_moved if swap is not None else 0,
            "host_weight_gradients": swap.gradients_moved if swap is not None else 0,
        }

    def count_anew(self) -> None:
        """Count bytes from zero again."""
        if self._mover is not None:
            self._mover.bytes_moved = 0
        if self._swap is not None:
            self._swap.weights_moved = self._swap.gradients_moved = 0

    def require_empty(self) -> None:
        """Check that nothing is on its way any more.

        Raises:
            RuntimeError: something is.
        """
        if self._mover is not None:
            self._mover.require_empty()
        if self._swap is not None:
            self._swap.require_empty()

    def abandon(self) -> None:
        """Bring weights back to their homes after a step that has failed."""
        if self._swap is not None:
            self._swap.abandon()
