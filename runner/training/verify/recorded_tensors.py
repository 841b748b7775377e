"""The files by which a layout and one process are compared: gradients as the optimizer gets them, and weights.

Every rank writes ``<run_dir>/recorded/step-<k>/rank-<r>.safetensors`` with the tensors ``gradient/<name>`` and
``weight/<name>`` of its stages; steps count from 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from runner.config.schema import RunConfig
from runner.model.layers import StageModule
from runner.plan.prediction import predicts
from runner.plan.requested_schedule import executed_schedule, is_chosen_by_plan
from runner.profile import ModelProfile

__all__ = ["gradients_of", "read_tensors", "recorded_steps", "weights_of", "write_tensors"]

_DIRECTORY = "recorded"
_ORDER = "order"  # safetensors does not keep the order of tensors
_MOST_BYTES = 4 << 30


def recorded_steps(config: RunConfig, profile: ModelProfile) -> range:
    """The steps that are recorded: all, or only the last one.

    It is the last one for a large model, and for a schedule whose result depends on when the pipeline is drained:
    steps are recorded while the pipeline is drained.
    """
    weights = sum(layer.weight_bytes + layer.gradient_bytes for layer in profile.layers)
    last = config.trainer.max_steps
    copies = 1 + config.parallelism.data  # one copy per replica, and one for the single process
    are_all = weights * copies * last <= _MOST_BYTES and not _depends_on_drains(config)
    return range(1, last + 1) if are_all else range(last, last + 1)


def _depends_on_drains(config: RunConfig) -> bool:
    if is_chosen_by_plan(config):
        return False
    order = executed_schedule(config)
    return order.reads_newest or (order.is_asynchronous and predicts(config, order.name))


def weights_of(module: StageModule) -> dict[str, Tensor]:
    """Parameters and persistent buffers by global name."""
    return module.global_state()


def gradients_of(module: StageModule) -> dict[str, Tensor]:
    """Gradients by the parameters' global names."""
    return {
        module.global_name(name): parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def write_tensors(
    run_dir: Path, step: int, rank: int, gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> None:
    """Write one rank's tensors of a step."""
    directory = run_dir / _DIRECTORY / f"step-{step}"
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"gradient/{name}": tensor for name, tensor in gradients.items()}
    tensors |= {f"weight/{name}": tensor for name, tensor in weights.items()}
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, directory / f"rank-{rank}.safetensors", {_ORDER: json.dumps(list(copies))})


def read_tensors(run_dir: Path, step: int) -> list[dict[str, Tensor]]:
    """The tensors of a step by rank, in the order of the model; empty if the step was not recorded."""
    files = (run_dir / _DIRECTORY / f"step-{step}").glob("rank-*.safetensors")
    by_rank = sorted(files, key=lambda path: int(path.stem.removeprefix("rank-")))
    return [_read(path) for path in by_rank]


def _read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in json.loads(file.metadata()[_ORDER])}
