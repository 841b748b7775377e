"""Where the elements of each parameter lie in the flat partitions that DeepSpeed's optimizers update.

As read from DeepSpeed 0.19.8: stages 1 and 2 cut the concatenation of all parameters anywhere (stage_1_and_2.py,
``params_in_partition``, ``first_offset``); stage 3 cuts each parameter by itself (stage3.py, ``grad_position``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from runner.optim.kinds.eight_bits import Piece

__all__ = ["pieces"]


def pieces(outer: Any, stage: int) -> Iterator[tuple[Tensor, list[Piece]]]:
    """Every flat weight of this rank with its pieces.

    Args:
        outer: DeepSpeed's optimizer of ZeRO 1, 2 or 3.
    """
    yield from _of_rows(outer) if stage < 3 else _of_parameters(outer)


def _of_rows(outer: Any) -> Iterator[tuple[Tensor, list[Piece]]]:
    from runner.optim.kinds.eight_bits import Piece

    rows = zip(
        outer.single_partition_of_fp32_groups,
        outer.params_in_partition,
        outer.first_offset,
        outer.partition_size,
        strict=True,
    )
    for flat, parameters, offset, size in rows:
        found, start = [], 0
        for parameter in parameters:
            stop = min(int(size), start + parameter.numel() - offset)
            found.append(Piece(start, stop, offset, parameter.numel()))
            start, offset = stop, 0
        yield flat, found


def _of_parameters(outer: Any) -> Iterator[tuple[Tensor, list[Piece]]]:
    from runner.optim.kinds.eight_bits import Piece

    for flat, parameters in zip(outer.fp32_partitioned_groups_flat, outer.fp16_groups, strict=True):
        found = []
        for parameter in parameters:
            _, start, count = outer.grad_position[outer.get_param_id(parameter)]
            offset = outer._get_param_partition_rank(parameter) * count
            own = max(0, min(count, parameter.ds_numel - offset))  # the last rank's part may end in padding
            if own:
                found.append(Piece(start, start + own, offset, parameter.ds_numel))
        yield flat, found
