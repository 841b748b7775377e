"""Optimizer state by global parameter name, so that a checkpoint does not depend on who held which layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runner.model.layers import StageModule

__all__ = ["gather_optimizer_state", "load_optimizer_state", "own_optimizer_state"]


def own_optimizer_state(optimizer: Optimizer, stages: Mapping[int, StageModule]) -> dict[str, Any]:
    """``{"state": {global name: {…}}, "param_groups": [settings]}`` of this rank; tensors on the CPU."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)
    state = {}
    for name, parameter in _parameters(stages).items():
        if parameter in optimizer.state:
            entries = optimizer.state[parameter].items()
            state[name] = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in entries}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def gather_optimizer_state(parts: Sequence[dict[str, Any] | None] | None) -> dict[str, Any]:
    """One state out of the ranks'; the settings are the same on each."""
    held = [part for part in parts or [] if part is not None]
    if not held:
        return {}
    return {
        "state": {name: value for part in held for name, value in part["state"].items()},
        "param_groups": held[0]["param_groups"],
    }


def load_optimizer_state(optimizer: Optimizer, stages: Mapping[int, StageModule], state: dict[str, Any]) -> None:
    """Put this rank's part of a whole state into its optimizer."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {parameter: number for number, parameter in enumerate(held)}  # torch numbers them in this order
    own = {
        numbers[parameter]: state["state"][name]
        for name, parameter in _parameters(stages).items()
        if parameter in numbers and name in state["state"]
    }
    groups = [
        {**saved, "params": current["params"]}
        for saved, current in zip(state["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": own, "param_groups": groups})


def _parameters(stages: Mapping[int, StageModule]) -> dict[str, Parameter]:
    return {
        module.global_name(name): parameter
        for module in stages.values()
        for name, parameter in module.named_parameters()
    }
