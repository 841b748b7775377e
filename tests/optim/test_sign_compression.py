"""One bit per element between replicas: what is sent, what is left over, and what goes over the wire."""

from __future__ import annotations

import pytest
import torch

from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.update.replicas import ReplicaExchange
from runner.optim.compression.signs import Alone, SignCompression

SIZES = [4096, 64, 9000, 3, 1]
ELEMENTS = sum(SIZES)
ROUNDS = 12


def exchanged(replicas: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]]:
    """Per replica: sums of what came in and of what came out, both errors, bytes sent in a round."""

    def run(transport: ThreadTransport) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
        exchange = ReplicaExchange(transport, tuple(range(replicas))) if replicas > 1 else Alone()
        compression = SignCompression(SIZES, exchange, torch.device("cpu"))
        generator = torch.Generator().manual_seed(transport.rank)
        mask = torch.ones(ELEMENTS, dtype=torch.bool)
        mask[100:200] = False
        came, went = torch.zeros(ELEMENTS, dtype=torch.float64), torch.zeros(ELEMENTS, dtype=torch.float64)
        for _ in range(ROUNDS):
            values = torch.randn(ELEMENTS, generator=generator)
            came += values * mask
            went += compression.mean(values, mask)
        sent = exchange.bytes_sent / ROUNDS if isinstance(exchange, ReplicaExchange) else 0
        return came, went, compression.worker_error, compression.server_error, sent

    return run_ranks(replicas, run)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_what_was_sent_and_what_is_left_over_is_what_came_in(replicas: int) -> None:
    found = exchanged(replicas)
    came = sum(part[0] for part in found) / replicas
    left = sum(part[2].double() for part in found) / replicas + torch.cat([part[3] for part in found]).double()
    for _, went, *_ in found:
        assert torch.equal(went, found[0][1])  # every replica has the same numbers
        assert float((went + left - came).abs().max()) < 1e-4
        assert float(went[100:200].abs().max()) == 0


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_fifteenth_of_an_all_reduce_in_fp16(replicas: int) -> None:
    ring = 2 * (replicas - 1) / replicas * 2 * ELEMENTS
    for *_, sent in exchanged(replicas):
        assert ring / 16.5 < sent <= ring / 15


def test_one_round_is_the_formula() -> None:
    """Alone: twice compressed, mean |z| * sign(z) of each block of 1024 within a tensor."""
    values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    compression = SignCompression(SIZES, Alone(), torch.device("cpu"))
    mean = compression.mean(values.clone(), torch.ones(ELEMENTS, dtype=torch.bool))
    blocks = [block for part in values.split(SIZES) for block in part.split(1024)]  # type: ignore[no-untyped-call]  # the library's
    expected = torch.cat([block.abs().mean() * block.sign() for block in blocks])
    assert torch.allclose(mean, expected, atol=3e-5)
    assert torch.allclose(compression.worker_error, values - expected, atol=3e-5)
