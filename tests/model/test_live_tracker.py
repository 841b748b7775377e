"""Bytes of live tensors, against sizes by hand and torch's own memory profiler."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from runner.model.live_tracker import LiveTracker


def test_by_hand() -> None:
    with LiveTracker() as tracker:
        a = torch.zeros(100)
        assert (tracker.live, tracker.peak) == (400, 400)
        b = a + 1
        view = b[10:20].view(2, 5)
        b.mul_(2)
        assert tracker.live == 800, "views and in-place results share their input's bytes"
        c = a.double()
        assert tracker.live == 1600
        del b
        assert tracker.live == 1600, "its view keeps it"
        del view
        assert tracker.live == 1200
        tracker.reset_peak()
        assert tracker.peak == 1200
        d = torch.zeros(1000, dtype=torch.uint8)
        del a, c, d
    assert (tracker.live, tracker.peak) == (0, 2200)


def test_a_tensor_made_outside_counts_when_watched_and_until_it_dies() -> None:
    tensor = torch.zeros(10)
    tracker = LiveTracker()
    with tracker:
        tracker.watch(tensor)
        tracker.watch(tensor)
        assert tracker.live == 40
        del tensor
        assert tracker.live == 0


@pytest.mark.parametrize("layer", ["attention", "mlp", "normed"])
def test_the_peak_of_forward_and_backward_is_the_allocators(layer: str) -> None:
    torch.manual_seed(0)
    module, given = {
        "attention": (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), torch.randn(4, 16, 32)),
        "mlp": (nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(32, 64)),
        "normed": (nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 8), nn.BatchNorm1d(8)), torch.randn(16, 32)),
    }[layer]

    def run() -> None:
        module(given).square().mean().backward()

    run()  # gradients are there from now on, and libraries have what they keep
    with LiveTracker() as tracker:
        run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    live = peak = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak > 0
    assert tracker.peak == peak
