"""Gathers weights and optimizer states that DeepSpeed shards, by global name, and loads them again.

A checkpoint has the same form for every ZeRO stage, so that a run can be resumed with another stage, or without ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from runner.checkpoint.state import as_counted
from runner.optim.states.delayed import DELAYED, DelayedUpdate
from runner.optim.states.master import MASTER
from runner.optim.states.settings import apply_settings, settings_of
from runner.strategy.zero.stage import DeepSpeedStage

__all__ = ["flat_weights", "gathered_weights", "load_states", "whole_states"]


def gathered_weights(sharding: DeepSpeedStage, *, write: bool = False) -> AbstractContextManager[Any]:
    """Within the block, every weight of the stage is complete on every replica.

    With ``write``, the first replica's changes are kept. Every replica must enter it.
    """
    if sharding.stage < 3:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    # A validation's forwards fetch ahead what backwards would use; nothing may be on its way while all is gathered.
    sharding.optimizer.checkpoint_event_prologue()
    context: AbstractContextManager[Any] = GatheredParameters(
        list(sharding.module.parameters()), modifier_rank=0 if write else None
    )
    return context


def whole_states(sharding: DeepSpeedStage, *, masters: bool) -> dict[str, Any]:
    """``{"state": {global name: {…}}, "param_groups": [settings]}`` of the stage on every replica; on the CPU.

    Args:
        masters: whether the state includes fp32 master weights.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer = sharding.optimizer.optimizer
    template = _any_state(sharding)
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in _trained(sharding) if template else ():
        entries: dict[str, Any] = {}
        if masters:
            entries[MASTER] = safe_get_full_fp32_param(parameter).cpu()
        for key, value in template.items():
            if _is_shared_out(value):
                whole = safe_get_full_optimizer_state(parameter, key)
                entries[key] = whole.detach().to("cpu", value.dtype)
            else:
                entries[key] = value.detach().clone().cpu() if isinstance(value, Tensor) else value
        state[name] = entries
    return {"state": state, "param_groups": settings_of(optimizer)}


@torch.no_grad()
def load_states(sharding: DeepSpeedStage, saved: Mapping[str, Any]) -> None:
    """Load this replica's part of a whole state."""
    outer = sharding.optimizer
    apply_settings(outer.optimizer, saved["param_groups"])
    dropped = frozenset[str]() if isinstance(outer.optimizer, DelayedUpdate) else DELAYED
    own = {
        name: {key: value for key, value in saved["state"][name].items() if key not in dropped}
        for name, _ in _trained(sharding)
        if name in saved["state"]
    }
    if not own:
        return
    template = as_counted(outer.optimizer, next(iter(own.values())))
    for flat in flat_weights(sharding):
        outer.optimizer.state[flat] = {
            key: torch.zeros_like(flat, requires_grad=False) if _is_shared_out(value) else _copied(value)
            for key, value in template.items()
            if key != MASTER
        }
    if sharding.twin is not None:
        sharding.twin.restore_counters()
    if sharding.stage < 3:
        outer._hp_optimizer_states_linked = False
        outer._lazy_init_hp_params_optimizer_state()
    for name, parameter in _trained(sharding):
        for key, value in own[name].items():
            if key == MASTER:
                _put(sharding, parameter, value, None)
            elif _is_shared_out(value):
                _put(sharding, parameter, value, key)


def _put(sharding: DeepSpeedStage, parameter: Parameter, value: Tensor, key: str | None) -> None:
    """Set this replica's part of a state (``key``), or of the master weight (``key`` None)."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    if sharding.stage < 3:
        if key is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)
        return
    count = parameter.ds_tensor.numel()  # type: ignore[attr-defined]  # set by DeepSpeed
    padded = torch.zeros(count * sharding.replicas, dtype=value.dtype)
    padded[: value.numel()] = value.flatten()
    rank = sharding.engine.optimizer._get_param_partition_rank(parameter)
    sharding.optimizer.set_local_hp_param(padded[rank * count : (rank + 1) * count], parameter, key)


def _trained(sharding: DeepSpeedStage) -> Iterator[tuple[str, Parameter]]:
    for name, parameter in sharding.module.named_parameters():
        if parameter.requires_grad:
            yield sharding.module.global_name(name), parameter


def flat_weights(sharding: DeepSpeedStage) -> list[Tensor]:
    """The flat weights that the wrapped optimizer updates."""
    outer = sharding.optimizer
    flats: list[Tensor] = (
        outer.single_partition_of_fp32_groups if sharding.stage < 3 else outer.fp32_partitioned_groups_flat
    )
    return flats


def _any_state(sharding: DeepSpeedStage) -> dict[str, Any]:
    """The state of the last flat weight, which always belongs to the named optimizer; empty before the first update."""
    return dict(sharding.optimizer.optimizer.state.get(flat_weights(sharding)[-1], {}))


def _is_shared_out(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
