"""0/1 Adam and 1-bit LAMB of two replicas against plain loops over both, their errors, and what they send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from narrow import present
from torch import nn

from runner.config.schema import OptimizerConfig
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.update.replicas import ReplicaExchange
from runner.optim.build import build_optimizer
from runner.optim.catalogue.registry import OPTIMIZERS
from runner.optim.kinds.onebit import OneBitOptimizer

SHAPES = [(6, 8), (16,), (4, 8)]
SIZES = [48, 16, 32]
HALF = sum(SIZES) // 2
STEPS, REPLICAS = 24, 2
BETAS, EPS, LR, DECAY = (0.9, 0.95), 1e-4, 1e-2, 0.1
KINDS = {
    "onebit_adam_refreshed": {"freeze_step": 18, "variance_refreshes": 3},
    "onebit_lamb": {"freeze_step": 10},
    "onebit_adam": {"freeze_step": 10},
}
FULL = {
    "onebit_adam_refreshed": {0, 1, 2, 3, 5, 7, 9, 13, 17},  # gaps of 1, 2 and 4, three of each, until the freeze
    "onebit_lamb": set(range(10)),
    "onebit_adam": set(range(10)),
}


def start() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def gradients(step: int) -> torch.Tensor:
    """Of each replica, flat; the first eight elements never have one, and late ones are large: frozen rates fall."""
    generator = torch.Generator().manual_seed(100 + step)
    made = torch.randn(REPLICAS, sum(SIZES), generator=generator) * torch.linspace(0.1, 2.0, sum(SIZES))
    made[:, :8] = 0
    return made * 10 if step >= 11 else made


def trained(
    name: str, steps: int = STEPS
) -> list[tuple[torch.Tensor, list[torch.Tensor], list[bool], OneBitOptimizer, int]]:
    """Of each replica: weights, momenta and whether it compressed by step, the optimizer, bytes sent."""

    def run(
        transport: ThreadTransport,
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[bool], OneBitOptimizer, int]:
        parameters = [nn.Parameter(value.clone()) for value in start()]
        settings: dict[str, Any] = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY, **KINDS[name]}
        optimizer = build_optimizer(OptimizerConfig(name=name, **settings), parameters)
        assert isinstance(optimizer, OneBitOptimizer)
        exchange = ReplicaExchange(transport, tuple(range(REPLICAS)))
        optimizer.attach(exchange)
        compressed, momenta = [], []
        for step in range(steps):
            compressed.append(optimizer.compresses)
            given = gradients(step)
            own = given[transport.rank] / REPLICAS if optimizer.compresses else given.mean(dim=0)
            for parameter, part in zip(parameters, own.split(SIZES), strict=True):  # type: ignore[no-untyped-call]  # the library's
                parameter.grad = part.view_as(parameter).clone()
            optimizer.step()
            momenta.append(torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in parameters]))
        weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        return weights, momenta, compressed, optimizer, exchange.bytes_sent

    return run_ranks(REPLICAS, run)


class Plain:
    """Both replicas' in one loop over flat vectors, whose chunks are halves."""

    def __init__(self, full: set[int]) -> None:
        self.full, self.weights = full, torch.cat([value.flatten() for value in start()])
        self.m, self.v, self.fresh, self.server = (torch.zeros(sum(SIZES)) for _ in range(4))
        self.worker = [torch.zeros(sum(SIZES)) for _ in range(REPLICAS)]
        self.rate, self.factor = [0.0] * len(SIZES), [1.0] * len(SIZES)

    def signs(self, z: torch.Tensor) -> torch.Tensor:
        made, mask = torch.zeros_like(z), self.v > 0
        for a, b in ((0, 48), (48, 64), (64, 96)):
            for low, high in ((a, min(b, HALF)), (max(a, HALF), b)):
                if low < high:
                    counted = mask[low:high].sum().clamp(min=1)
                    made[low:high] = torch.where(z[low:high] >= 0, 1.0, -1.0) * z[low:high].abs().sum() / counted
        return made * mask

    def momentum(self, given: torch.Tensor, step: int) -> None:
        if step in self.full:
            mean = given.mean(dim=0)
            self.m = BETAS[0] * self.m + (1 - BETAS[0]) * mean
            self.v = BETAS[1] * self.v + (1 - BETAS[1]) * mean**2
            self.fresh = self.v.clone()
            return
        told = []
        for replica in range(REPLICAS):
            z = (BETAS[0] * self.m + (1 - BETAS[0]) * given[replica] + self.worker[replica]) * (self.v > 0)
            told.append(self.signs(z))
            self.worker[replica] = z - told[-1]
        z, before = sum(told) / REPLICAS + self.server, self.m
        self.m = self.signs(z)
        self.server = z - self.m
        self.fresh = BETAS[1] * self.fresh + (1 - BETAS[1]) * ((self.m - BETAS[0] * before) / (1 - BETAS[0])) ** 2

    def adam(self, step: int) -> None:
        self.weights = self.weights - LR * (self.m / (self.v.sqrt() + EPS) + DECAY * self.weights)

    def lamb(self, step: int) -> None:
        moved = []
        parts = [value.split(SIZES) for value in (self.weights, self.m, self.v, self.fresh)]  # type: ignore[no-untyped-call]  # the library's
        for number, (w, m, v, fresh) in enumerate(zip(*parts, strict=True)):
            adam = m / (v.sqrt() + EPS)
            update = adam + DECAY * w
            if step in self.full:
                rate = min(10.0, max(0.01, float(w.norm() / update.norm())))
                self.rate[number] = 0.9 * self.rate[number] + 0.1 * rate
            else:
                share = min(1.0, float(adam.norm() / update.norm()))
                factor = float(((v.sqrt() + EPS) / (fresh.sqrt() + EPS)).max()) * share + 1 - share
                last = self.factor[number]
                self.factor[number] = min(last * 1.1, max(last * 0.9, min(4.0, max(0.5, factor))))
                rate = self.rate[number] * self.factor[number]
            moved.append(w - LR * rate * update)
        self.weights = torch.cat(moved)


@pytest.mark.parametrize("name", KINDS)
def test_two_replicas_are_the_plain_loop(name: str) -> None:
    plain = Plain(FULL[name])
    for step in range(STEPS):
        plain.momentum(gradients(step), step)
        (plain.lamb if name == "onebit_lamb" else plain.adam)(step)
    found = trained(name)
    for weights, *_ in found:
        assert torch.equal(weights, found[0][0])
        torch.testing.assert_close(weights, plain.weights, rtol=1e-4, atol=1e-5)
    if name == "onebit_lamb":
        factors = [state["factor"] for state in found[0][3].state.values()]
        assert factors == pytest.approx(plain.factor, rel=1e-4)
        assert min(factors) < 0.8  # frozen rates did not stay as they were


@pytest.mark.parametrize("name", KINDS)
def test_errors_telescope_over_compressed_steps_and_full_ones_leave_them(name: str) -> None:
    found = trained(name)
    came = torch.zeros(sum(SIZES), dtype=torch.float64)
    went, momentum = came.clone(), came.clone()
    for step in range(STEPS):
        assert found[0][2][step] == (step not in FULL[name])
        after = found[0][1][step].double()
        if step not in FULL[name]:
            came += BETAS[0] * momentum + (1 - BETAS[0]) * gradients(step).double().mean(dim=0)
            went += after
        momentum = after
    compressions = [part[3].compression for part in found]
    left = sum(made.worker_error for made in compressions) / REPLICAS
    left = left + torch.cat([made.server_error for made in compressions])
    assert float(left.abs().max()) > 0.01
    assert float((went + left - came).abs().max()) < 1e-4


@pytest.mark.parametrize("name", KINDS)
def test_it_sends_bits_at_compressed_steps_and_keeps_what_the_plan_says(name: str) -> None:
    for *_, optimizer, sent in trained(name):
        rounds = STEPS - len(FULL[name])
        scales = 2 * 4  # bytes; a half holds parts of two tensors
        assert sent == rounds * (REPLICAS - 1) * 2 * (HALF // 8 + scales)
        for parameter, state in optimizer.state.items():
            held = sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
            assert held == present(OPTIMIZERS[name].state_bytes)(parameter.numel())
