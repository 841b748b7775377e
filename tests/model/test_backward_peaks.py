"""One backward that keeps its gradients shows what it takes with gradients there before, and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.model.live_tracker import LiveTracker
from runner.profiling.backward_scan import BackwardWatch

WIDTH, SAMPLES = 32, 8


class _TwoOfOne(nn.Module):
    """Both weights have the same gradient, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, value: Tensor) -> Tensor:
        return value @ (self.first.view(-1) + self.second.view(-1)).view(WIDTH, WIDTH)


class _Transposed(nn.Module):
    """The gradient of its weight comes with other strides than the weight's, and is copied if it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(value @ torch.exp(self.weight.t()).contiguous())


class _Parts(nn.Module):
    """The gradients of its weights are parts of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        return value @ torch.cat(tuple(self.parts), dim=0).view(WIDTH, 3 * WIDTH)


class _Twice(nn.Module):
    """Two backwards within the backward make parts of the gradient of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        for _ in range(2):
            value = checkpoint(self.map, value, use_reentrant=True)
        return value


def _peak(module: nn.Module, *, there: bool) -> int:
    """The most bytes of a backward above what is there before, with or without gradients of weights."""
    for weight in module.parameters():
        weight.grad = torch.zeros_like(weight) if there else None
    given = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    with LiveTracker() as tracker:
        output = module(given)
        gradient = torch.ones_like(output)
        before = tracker.live
        tracker.reset_peak()
        output.backward(gradient)
        peak: int = tracker.peak - before
    return peak


MODULES: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
    "one gradient": _TwoOfOne, "strides": _Transposed, "parts": _Parts, "twice": _Twice,
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_one_backward_shows_both_peaks(name: str) -> None:
    module = MODULES[name]()
    adding, keeping = _peak(module, there=True), _peak(module, there=False)
    for weight in module.parameters():
        weight.grad = None
    given = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    with LiveTracker() as tracker:
        watch = BackwardWatch(tracker, list(module.parameters()))
        output, _ = watch.forward(lambda: module(given))
        gradient = torch.ones_like(output)
        found = watch.backward(lambda: output.backward(gradient), tracker.live)
    assert max(found.peak, found.keeping) == keeping
    if name == "parts":  # the whole counts until the backward ends
        assert adding <= found.peak <= keeping
    else:
        assert found.peak == adding
    assert all(weight.grad is None for weight in module.parameters())
    assert watch.unreached == ()
