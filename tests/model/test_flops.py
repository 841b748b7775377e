"""FLOPs are torch's own counts, and counting them changes no memory."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from runner.model.live_tracker import LiveTracker
from runner.profiling.flops import FlopCounter

BYTES = 4 * 1000


def peak_of_backward(counter: FlopCounter | None) -> int:
    value = torch.randn(1000, requires_grad=True)
    with LiveTracker() as tracker:
        output = functional.silu(value)
        gradient = torch.ones_like(output)
        before = tracker.live
        tracker.reset_peak()
        if counter is None:
            output.backward(gradient)  # type: ignore[no-untyped-call]
        else:
            with counter:
                output.backward(gradient)  # type: ignore[no-untyped-call]
    return int(tracker.peak - before)


def test_the_backward_of_silu_stays_one_operator() -> None:
    """Its parts, into which torch's own counter takes it, allocate a sigmoid and products."""
    assert peak_of_backward(None) == peak_of_backward(FlopCounter()) == BYTES


def test_totals_are_torchs() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    batch = torch.randn(5, 8)
    with FlopCounter() as own:
        model(batch).sum().backward()
    with FlopCounterMode(display=False) as theirs:
        model(batch).sum().backward()
    assert own.total == theirs.get_total_flops() > 2 * 5 * (8 * 16 + 16 * 4)


def test_attention_is_counted() -> None:
    """Two products of [8, 4] with [4, 8] forward, and five backward, of each of two heads."""
    query, key, value = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    with FlopCounter() as counter:
        output = functional.scaled_dot_product_attention(query, key, value)
        assert counter.total == 2 * 2 * (2 * 8 * 4 * 8)
        output.sum().backward()  # type: ignore[no-untyped-call]
    assert counter.total == 2 * (2 + 5) * (2 * 8 * 4 * 8)
