"""Compressors over Gloo between three processes: sums, what is left over, and bytes as the sockets count them."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from runner.config.schema import CompressionConfig
from runner.engine.transport.processes import ProcessTransport
from runner.engine.update.gradients import StageGradients
from runner.model.tags import ParameterTag
from runner.optim.catalogue.compression import Wire
from runner.optim.catalogue.registry import compression_of
from runner.optim.compression.rounds import GradientStep

RANKS, STEPS = 3, 2
SHAPES = [(400, 300), (60_000,), (30, 40, 50)]
KEYS: dict[str, dict[str, Any]] = {
    "none": {}, "fp16": {}, "bf16": {}, "topk": {"density": 0.02}, "randomk": {"density": 0.02}, "qsgd": {"levels": 7},
    "signsgd": {}, "powersgd": {"rank": 8}, "gradzip": {"rank": 8},
}  # fmt: skip
TCP_BYTES_SENT = 200  # where Linux's struct tcp_info has them, and after them those that were sent once more
SAID_TOO = 20_000  # bytes of Gloo's own headers, at most


def _process(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    transport = ProcessTransport(torch.device("cpu"), [tuple(range(RANKS))], timeout_seconds=60.0)
    for name in KEYS:
        check(name, transport, rank)
    dist.destroy_process_group()


def check(name: str, transport: ProcessTransport, rank: int) -> None:
    section = CompressionConfig(name=name, **KEYS[name], error_feedback=None if name == "none" else True)
    gradients = StageGradients([(str(at), nn.Parameter(torch.zeros(shape))) for at, shape in enumerate(SHAPES)], TAG)
    gradients.reducer = compression_of(section).reducer(section, gradients)
    dist.barrier()
    before, came, went = kernel_bytes(), torch.zeros(elements()), torch.zeros(elements())
    for step in range(STEPS):
        values = [drawn(step, each) for each in range(RANKS)]
        came += torch.stack(values).sum(dim=0)
        fill(gradients, values[rank])
        for handle in gradients.reduce(transport, GradientStep(step)):
            handle.wait()
        went += torch.cat(
            [parameter.grad.flatten() for parameter in gradients.parameters if parameter.grad is not None]
        )
        gradients.close(applied=True)
    sent = kernel_bytes() - before
    expected = STEPS * compression_of(section).bytes_in_a_step(Wire(section, SHAPES, 4, RANKS))
    assert gradients.sent.num_bytes == pytest.approx(expected, rel=1e-3), name
    assert expected <= sent <= 1.02 * expected + SAID_TOO, f"{name}: the sockets sent {sent} bytes, not {expected}"
    state = gradients.reducer.state_dict()
    left = torch.cat([state[str(at)]["residual"].flatten() for at in range(len(SHAPES))]) if state else torch.zeros(1)
    total = left + torch.zeros(elements())
    dist.all_reduce(total)
    most = {"fp16": 0.02, "bf16": 0.2}.get(name, 1e-3)
    assert float((went + (total if state else 0) - came).abs().max()) < most, name
    others = [torch.empty_like(went) for _ in range(RANKS)]
    dist.all_gather(others, went)
    assert all(torch.equal(each, went) for each in others), name


def elements() -> int:
    return sum(torch.Size(shape).numel() for shape in SHAPES)


def drawn(step: int, rank: int) -> Tensor:
    return torch.randn(elements(), generator=torch.Generator().manual_seed(100 * step + rank))


def fill(gradients: StageGradients, values: Tensor) -> None:
    (flat,) = gradients.flats
    flat.copy_(values)


def kernel_bytes() -> int:
    """The bytes that this process's TCP sockets have sent."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        if not os.path.lexists(entry) or not str(entry.readlink()).startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
                sent, again = struct.unpack_from("QQ", info, TCP_BYTES_SENT)
                total += int(sent - again)
    return total


TAG = ParameterTag(
    name="0", names=("0",), stages=(0,), holders=tuple(range(RANKS)), is_first_copy=True, is_trained=True
)


@pytest.mark.costly
def test_sums_and_bytes_over_gloo(tmp_path: Path) -> None:
    spawn(_process, args=(str(tmp_path / "meeting"),), nprocs=RANKS)  # type: ignore[no-untyped-call]
