"""A GPT, divided between ranks by the runner and by others, and whole: processor time of a step in turns.

All ranks train the same batch from the same weights, with SGD. The attention's query, key and value are maps of their
own here, because DTensor would cut one weight that holds all three at the wrong places.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from runner.engine.transport.processes import ProcessTransport
from runner.engine.transport.tensor_group import TensorGroup
from runner.model.sharded.group import ShardGroup
from runner.model.sharded.plan import Division
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.tensor.frameworks import frameworks

__all__ = ["RULES", "Block", "compare", "measured"]

_WARM, _HEAD = 2, 32
_ALONE = "runner, without exchanges"  # what its products and operators cost; it learns nothing
RULES = {"query": "column", "key": "column", "value": "column", "out": "row", "up": "column", "down": "row"}


class Block(nn.Module):
    """Attention and a feed-forward layer; [samples, tokens, width] in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @staticmethod
    def tensor_plan() -> dict[str, str]:
        """How the runner divides the block."""
        return RULES

    def forward(self, hidden: Tensor) -> Tensor:
        given = self.norm(hidden)
        maps = self.query, self.key, self.value
        query, key, value = (each(given).unflatten(-1, (-1, _HEAD)).transpose(1, 2) for each in maps)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.feed_norm(hidden))))  # type: ignore[no-any-return]


def compare(ranks: int, *, width: int, layers: int, samples: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each contestant: milliseconds of a rank's step, and how far a gradient is off."""
    sizes = {"width": width, "layers": layers, "samples": samples, "tokens": tokens, "rounds": rounds}
    return [{"ranks": ranks, **sizes, **row} for row in run_ranks(ranks, measured, sizes)]


def measured(sizes: dict[str, int]) -> list[dict[str, Any]]:
    """One rank's part of :func:`compare`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(sizes["width"]) for _ in range(sizes["layers"])))
    batch = torch.randn(sizes["samples"], sizes["tokens"], sizes["width"])
    contestants = {"whole": copy.deepcopy(model), "runner": _by_runner(model), "DTensor": _by_dtensor(model)}
    contestants |= {name: divide(model, RULES) for name, divide in frameworks().items()}
    expected = _first_gradient(contestants["whole"], batch)
    off = {
        name: float((_first_gradient(each, batch) - expected).abs().max() / expected.abs().max())
        for name, each in contestants.items()
    }
    contestants[_ALONE] = _by_runner(model, exchanges=False)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    steps = {name: _stepping(each, batch) for name, each in contestants.items()}
    for number in range(_WARM + sizes["rounds"]):
        for name, step in steps.items():
            dist.barrier()
            worked, started = time.process_time(), time.perf_counter()
            step()
            if number >= _WARM:
                seconds[name].append((time.process_time() - worked, time.perf_counter() - started))
    return [
        {
            "contestant": name,
            "milliseconds": 1000 * median(worked for worked, _ in seconds[name]),
            "wall_milliseconds": 1000 * median(passed for _, passed in seconds[name]),
            "off": off.get(name),
        }
        for name in contestants
    ]


def _by_runner(model: nn.Module, exchanges: bool = True) -> nn.Module:
    own, ranks = copy.deepcopy(model), tuple(range(dist.get_world_size()))
    group = ShardGroup(len(ranks), dist.get_rank())
    Division(group).apply([(str(number), block) for number, block in enumerate(own.children())])
    if exchanges:
        transport = ProcessTransport(torch.device("cpu"), [ranks], timeout_seconds=120.0)
        group.exchange = TensorGroup(transport, ranks)
    own.group = group  # type: ignore[assignment]  # operators know it by its name alone
    return own


def _by_dtensor(model: nn.Module) -> nn.Module:
    own, mesh = copy.deepcopy(model), init_device_mesh("cpu", (dist.get_world_size(),))
    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    for block in own.children():
        parallelize_module(block, mesh, {name: styles[way]() for name, way in RULES.items()})
    return own


def _first_gradient(model: nn.Module, batch: Tensor) -> Tensor:
    """The gradient of the first norm's weight, which all ranks have whole."""
    model.zero_grad()
    torch.autograd.backward(model(batch).square().mean())
    found = next(iter(model.parameters())).grad
    assert found is not None
    return found.full_tensor() if isinstance(found, DTensor) else found.clone()


def _stepping(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(batch).square().mean())
        optimizer.step()

    return step
