"""Which elements of which weights lie in each replica's part of the flat weights of ZeRO."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.strategy.zero.flat_pieces import pieces

SIZES = (5, 8, 1)


def of_stage_3(rank: int, replicas: int) -> Any:
    """What DeepSpeed's optimizer of stage 3 knows: each weight is padded to parts alike, one behind the other."""
    counts = [-(-size // replicas) for size in SIZES]
    starts = [sum(counts[:at]) for at in range(len(counts))]
    return SimpleNamespace(
        fp32_partitioned_groups_flat=[torch.zeros(sum(counts))],
        fp16_groups=[[SimpleNamespace(at=at, ds_numel=size) for at, size in enumerate(SIZES)]],
        grad_position={at: (0, starts[at], counts[at]) for at in range(len(SIZES))},
        get_param_id=lambda weight: weight.at,
        _get_param_partition_rank=lambda weight: rank,
    )


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_the_padding_of_a_weights_last_parts_belongs_to_no_piece(replicas: int) -> None:
    """All replicas' pieces together are each weight's elements, each once."""
    owned: dict[int, list[int]] = {size: [] for size in SIZES}
    for rank in range(replicas):
        ((flat, found),) = pieces(of_stage_3(rank, replicas), 3)
        for piece in found:
            assert 0 <= piece.start < piece.stop <= flat.numel()
            owned[piece.elements] += range(piece.offset, piece.offset + piece.stop - piece.start)
    assert owned == {size: [*range(size)] for size in SIZES}
