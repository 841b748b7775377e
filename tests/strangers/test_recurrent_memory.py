"""Recurrent layers: their workspace, which fake tensors do not know, is extrapolated; their products are counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from runner.model.fake import fake_tensors
from runner.model.live_tracker import LiveTracker
from runner.profiling import real_sizes
from runner.profiling.flops import FlopCounter
from runner.profiling.real_sizes import RealSizes


@pytest.mark.parametrize("sizes", [(300, 64, 192, 192), (40, 200, 500, 700)], ids=str)
def test_the_workspace_of_a_long_sequence_is_extrapolated(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where measuring it takes too long: not below the true one, and at most a hundredth above."""
    steps, samples, features, hidden = sizes

    def found() -> int:
        real_sizes._workspace_bytes.cache_clear()
        with fake_tensors(), RealSizes():
            layer, value = nn.LSTM(features, hidden), torch.empty(steps, samples, features)
            with LiveTracker() as tracker:
                output = layer(value)
                assert output is not None
                return int(tracker.live)

    monkeypatch.setattr(real_sizes, "_MOST_FLOPS", 1e15)
    exact = found()
    monkeypatch.setattr(real_sizes, "_MOST_FLOPS", 1e9)
    assert exact <= found() <= 1.01 * exact


def unrolled(kind: str, steps: int, samples: int, features: int, hidden: int) -> float:
    """torch's count of the FLOPs of the same equations, written as a loop of linear layers."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    of_input, of_state = nn.Linear(features, gates * hidden), nn.Linear(hidden, gates * hidden)
    value = torch.randn(steps, samples, features, requires_grad=True)
    state = torch.randn(samples, hidden, requires_grad=True)
    cell, outputs = torch.zeros(samples, hidden), []
    with FlopCounterMode(display=False) as counter:
        for step in value:
            parts = (of_input(step).chunk(gates, -1), of_state(state).chunk(gates, -1))
            if kind == "LSTM":
                into, forget, new, out = (left + right for left, right in zip(*parts, strict=True))
                cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
                state = out.sigmoid() * cell.tanh()
            elif kind == "GRU":
                reset, update = (left + right for left, right in zip(parts[0][:2], parts[1][:2], strict=True))
                new = (parts[0][2] + reset.sigmoid() * parts[1][2]).tanh()
                state = (1 - update.sigmoid()) * new + update.sigmoid() * state
            else:
                state = (parts[0][0] + parts[1][0]).tanh()
            outputs.append(state)
        torch.stack(outputs).sum().backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("sizes", [(6, 4, 9, 17), (3, 8, 32, 16), (1, 2, 5, 5)], ids=str)
def test_flops_are_those_of_the_loop_of_its_equations(kind: str, sizes: tuple[int, int, int, int]) -> None:
    steps, samples, features, hidden = sizes
    layer: nn.Module = getattr(nn, kind)(features, hidden)
    value = torch.randn(steps, samples, features, requires_grad=True)
    state = torch.randn(1, samples, hidden, requires_grad=True)
    with FlopCounter() as counter:
        layer(value, (state, torch.zeros_like(state)) if kind == "LSTM" else state)[0].sum().backward()
    assert counter.total == unrolled(kind, *sizes)
