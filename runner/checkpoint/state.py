"""Optimizer state by global parameter name, so that a checkpoint does not depend on which rank held which layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runner.checkpoint.parts import DividedTensor
from runner.errors import Problem
from runner.model.layers import StageModule
from runner.model.tags import named_parameters
from runner.optim.catalogue.registry import kind_of_class
from runner.optim.states.delayed import DELAYED
from runner.optim.states.settings import settings_of

__all__ = [
    "GROWN",
    "as_counted",
    "extra_state_problems",
    "as_saved",
    "gather_optimizer_state",
    "load_buffers",
    "load_optimizer_state",
    "own_buffers",
    "own_optimizer_state",
    "tensor_problems",
]

GROWN = "grown_buffers"
"""Key, in a checkpoint, of the shapes of buffers that forwards have made or given another shape, by global name."""

_MOST_DIFFERENCES = 3


def own_optimizer_state(
    optimizer: Optimizer, parameters: Mapping[str, Parameter], states: Mapping[Tensor, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """``{"state": {global name: {…}}, "param_groups": [settings]}`` of some parameters; tensors on the CPU.

    Args:
        parameters: the parameters by global name; those without a state are left out.
        states: the states by parameter; needed if the optimizer's own states belong to other tensors.
    """
    optimizer = getattr(optimizer, "_optimizer", optimizer)
    found = optimizer.state if states is None else states
    state = {}
    for name, parameter in parameters.items():
        if parameter in found:
            entries = found[parameter].items()
            state[name] = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in entries}
    return {"state": state, "param_groups": settings_of(optimizer)}


def own_buffers(stages: Mapping[int, StageModule]) -> dict[str, Tensor]:
    """Persistent buffers of this rank by global name, on the CPU; a forward may change them (running statistics)."""
    found = {}
    for module in stages.values():
        weights = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        for name, value in module.state_dict().items():
            if name not in weights:
                found[module.global_name(name)] = as_saved(value)
    return found


def as_saved(value: Tensor) -> Tensor:
    """A weight or buffer as files hold it: on the CPU, without its graph, and of no class but torch's own."""
    return value.detach().as_subclass(Tensor).cpu()


def extra_state_problems(stages: Mapping[int, StageModule]) -> list[Problem]:
    """Problems with layers whose ``get_extra_state`` returns no tensor: files hold a model's state as tensors."""
    found = []
    for module in stages.values():
        for name, value in module.state_dict().items():
            if not isinstance(value, Tensor):
                rule = "must be a tensor, to be saved with the weights"
                why = f"get_extra_state returns a {type(value).__name__}"
                fix = "register_buffer, or on_save_checkpoint of a LightningModule, keep a state"
                found.append(Problem("model", module.global_name(name), rule, f"{why}; {fix}"))
    return found


def load_buffers(stages: Mapping[int, StageModule], buffers: Mapping[str, Tensor]) -> None:
    """Copy ``buffers`` into the stages that hold them; other buffers are unchanged."""
    for module in stages.values():
        module.put_buffers(buffers)


def gather_optimizer_state(parts: Sequence[dict[str, Any] | None] | None) -> dict[str, Any]:
    """Merge the states of the ranks into one; the settings are the same on each."""
    held = [part for part in parts or [] if part is not None]
    if not held:
        return {}
    return {
        "state": {name: value for part in held for name, value in part["state"].items()},
        "param_groups": held[0]["param_groups"],
    }


def load_optimizer_state(optimizer: Optimizer, stages: Mapping[int, StageModule], state: Mapping[str, Any]) -> None:
    """Load this rank's part of a whole state into its optimizer."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {parameter: number for number, parameter in enumerate(held)}  # torch numbers parameters in this order
    own = {
        numbers[parameter]: as_counted(optimizer, _copied(_without_delay(state["state"][name])))
        for name, parameter in named_parameters(stages).items()
        if parameter in numbers and name in state["state"]
    }
    groups = [
        {**saved, "params": current["params"]}
        for saved, current in zip(state["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": own, "param_groups": groups})


def as_counted(optimizer: Optimizer, entries: Mapping[str, Any]) -> dict[str, Any]:
    """One weight's saved state in the form of this optimizer.

    Some optimizers count their steps in a tensor, others in a number.
    """
    step, kind = entries.get("step"), kind_of_class(type(optimizer))
    if kind is not None and kind.counts_steps == "tensor" and isinstance(step, int | float):
        return {**entries, "step": torch.tensor(float(step))}
    if kind is not None and kind.counts_steps == "number" and isinstance(step, Tensor):
        return {**entries, "step": int(step)}
    return dict(entries)


def tensor_problems(
    model: Mapping[str, Sequence[int]],
    checkpoint: Mapping[str, Tensor | DividedTensor],
    grown: Collection[str] = (),
) -> list[Problem]:
    """Reasons why a checkpoint's weights do not fit this model: the first tensors that differ, in model order.

    Args:
        model: shapes by global name, of the whole model.
        checkpoint: tensors, or their parts, by global name.
        grown: names of buffers that forwards have made or given another shape, :data:`GROWN`; they are not compared.
    """
    differences = []
    for name in [*model, *(name for name in checkpoint if name not in model)]:
        if name in grown:
            continue
        if name not in checkpoint:
            differences.append(f"{name} {tuple(model[name])} is not in the checkpoint")
        elif name not in model:
            differences.append(f"{name} {tuple(checkpoint[name].shape)} is not in the model")
        elif tuple(model[name]) != tuple(checkpoint[name].shape):
            differences.append(f"{name} is {tuple(model[name])}, in the checkpoint {tuple(checkpoint[name].shape)}")
    if not differences:
        return []
    more = len(differences) - _MOST_DIFFERENCES
    why = "; ".join(differences[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    return [Problem("resume", "checkpoint", "must hold the tensors of this model", why)]


def _without_delay(entries: Mapping[str, Any]) -> dict[str, Any]:
    """A weight's states without those of a delayed update, whose last gradients then never take effect."""
    return {key: value for key, value in entries.items() if key not in DELAYED}


def _copied(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the tensors, because those of a checkpoint are memory-mapped."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}
