"""Messages between stages of which each rank of a group sends and receives a part, and which the group puts together.

All ranks that divide a layer have the same output of it, so that each need send only one part over the link between
stages; they then exchange the parts over their own, which is faster.

Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from runner.engine.transport.tensor_group import TensorGroup

__all__ = ["Scattering"]


class Scattering:
    """Takes a rank's part of messages.

    Args:
        group: the ranks that have the same messages; None: messages stay whole.
    """

    def __init__(self, group: TensorGroup | None) -> None:
        self._group = group

    def parts(self, messages: Sequence[Tensor], needing: Sequence[bool]) -> list[Tensor]:
        """What this rank sends, or receives into, for messages that are contiguous.

        Args:
            messages: the whole ones.
            needing: for each, whether it has, or is, a gradient; the others are the same few numbers on all ranks.
        """
        if self._group is None:
            return list(messages)
        pairs = zip(messages, needing, strict=True)
        return [self._group.own_part(each) if self._group.divides(each, needs) else each for each, needs in pairs]

    def putting_together(self, messages: Sequence[Tensor], needing: Sequence[bool]) -> Callable[[], None] | None:
        """The function that completes messages of which the parts have arrived; None: they are whole."""
        group = self._group
        if group is None:
            return None
        parts = [each for each, needs in zip(messages, needing, strict=True) if group.divides(each, needs)]

        def put_together() -> None:
            for message in parts:
                group.complete(message)

        return put_together if parts else None
