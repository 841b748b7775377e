"""The blocks of :mod:`runner.recipes.tensor.peers` divided by DeepSpeed's AutoTP and by megatron-core.

Both get the layers' names and how each is divided. AutoTP is called as its users do, by a configuration. Megatron-core
has no way to divide a model that exists: its layers are put in the place of ours, with the same weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.strategy.zero.stage import start_deepspeed

__all__ = ["frameworks"]

Divide = Callable[[nn.Module, Mapping[str, str]], nn.Module]


def frameworks() -> dict[str, Divide]:
    """Those that are installed, by name; each takes a model and a way, ``column`` or ``row``, for its layers' names."""
    known = {"AutoTP": ("deepspeed", _by_autotp), "megatron-core": ("megatron", _by_megatron)}
    return {name: divide for name, (package, divide) in known.items() if find_spec(package) is not None}


def _by_autotp(model: nn.Module, ways: Mapping[str, str]) -> nn.Module:
    specs = [
        {
            "patterns": [rf".*\.({'|'.join(name for name, of in ways.items() if of == way)})\.weight$"],
            "partition_type": way,
        }
        for way in ("column", "row")
    ]
    own = copy.deepcopy(model)
    engine, *_ = start_deepspeed(torch.device("cpu"), {}, dist.get_rank()).initialize(
        model=own,
        optimizer=torch.optim.SGD(own.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "tensor_parallel": {
                "autotp_size": dist.get_world_size(),
                "partition_config": {"use_default_specs": False, "layer_specs": specs},
            },
        },
    )
    divided: nn.Module = engine.module
    return divided


class _WithoutBias(nn.Module):
    """Megatron's layers return the sum and a bias that somebody else may add."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.layer(value)[0]
        return made


def _by_megatron(model: nn.Module, ways: Mapping[str, str]) -> nn.Module:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]  # it asks where layers are made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels for GPUs that are not there
        from megatron.core import ModelParallelConfig, parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
        config = ModelParallelConfig(
            tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True, perform_initialization=False
        )
        kinds: dict[str, Callable[..., Any]] = {
            "column": lambda *sizes: ColumnParallelLinear(
                *sizes, config=config, init_method=None, bias=True, gather_output=False
            ),
            "row": lambda *sizes: RowParallelLinear(
                *sizes, config=config, init_method=None, bias=True, input_is_parallel=True, skip_bias_add=False
            ),
        }
        own = copy.deepcopy(model)
        for block in own.children():
            for name, way in ways.items():
                whole = block.get_submodule(name)
                assert isinstance(whole, nn.Linear)
                layer = kinds[way](whole.in_features, whole.out_features)
                _fill(layer, whole, way)
                setattr(block, name, _WithoutBias(layer))
    return own


def _fill(layer: Any, whole: nn.Linear, way: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        layer.weight.copy_(whole.weight.chunk(ranks, 0 if way == "column" else 1)[rank])
        layer.bias.copy_(whole.bias.chunk(ranks)[rank] if way == "column" else whole.bias)
