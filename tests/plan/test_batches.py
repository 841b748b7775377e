from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.plan.layout import batches


@settings(deadline=None)
@given(n=st.integers(0, 60), parts=st.integers(1, 20))
def test_split_sizes_are_tensor_split(n: int, parts: int) -> None:
    assert batches.split_sizes(n, parts) == tuple(len(part) for part in torch.arange(n).tensor_split(parts))


@given(batch=st.integers(0, 60), data=st.integers(1, 6), microbatches=st.integers(1, 9))
def test_microbatches_of_all_replicas_cover_the_batch_in_order(batch: int, data: int, microbatches: int) -> None:
    samples = list(range(batch))
    cut = [
        samples[part]
        for replica in range(data)
        for part in batches.microbatch_slices(batch, data, replica, microbatches)
    ]
    assert [sample for part in cut for sample in part] == samples
    sizes = [size for d in range(data) for size in batches.microbatch_sizes(batch, data, d, microbatches)]
    assert [len(part) for part in cut] == sizes
    assert max(sizes) == batches.largest_microbatch(batch, data, microbatches)


def test_steps_and_replicas_take_contiguous_parts() -> None:
    assert batches.step_range(3, 8) == range(24, 32)
    assert batches.replica_slice(10, 3, 0) == slice(0, 4)
    assert batches.replica_slice(10, 3, 2) == slice(7, 10)
    assert batches.microbatch_sizes(10, 1, 0, 4) == (3, 3, 2, 2)
    assert batches.mean_microbatch(10, 3, 8) == 0.5


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot split"):
        batches.split_sizes(4, 0)
