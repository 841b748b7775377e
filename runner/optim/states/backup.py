"""Copies of weights and optimizer states before a step, so that the step can be undone exactly.

Undoing an update by arithmetic is not exact: AdamW's inverse differs by up to 1e-9 in fp32. Restoring a copy is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.optim.states.master import MasterWeights
from runner.optim.states.settings import apply_settings, settings_of

__all__ = ["OptimizerBackup"]


class OptimizerBackup:
    """A copy of everything that a step of ``optimizer`` changes; as large as the weights and the states."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}  # each with its copy, which is reused from step to step
        self._entries: dict[Tensor, dict[str, Any]] = {}
        self._settings: list[dict[str, Any]] = []

    @torch.no_grad()
    def save(self) -> None:
        """Copy weights, states and settings (learning rate, …) as they are now."""
        self._settings = settings_of(self._optimizer)
        states = self._states()
        kept = [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
        self._saved = {id(value): (value, self._copy(value)) for value in (*self._weights(), *kept)}
        self._entries = {weight: dict(state) for weight, state in states.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore weights and states in place; states that the step created are removed. Settings are not restored."""
        for value, copy in self._saved.values():
            value.copy_(copy)
        states = self._states()
        for weight in list(states):
            if weight in self._entries:
                states[weight].update(self._entries[weight])
            else:
                del states[weight]

    def step_as_saved(self) -> None:
        """Step the optimizer with the saved settings; the present settings are restored afterwards."""
        now = settings_of(self._optimizer)
        apply_settings(self._optimizer, self._settings)
        self._optimizer.step()
        apply_settings(self._optimizer, now)

    def _weights(self) -> list[Tensor]:
        weights = [p for group in self._optimizer.param_groups for p in group["params"]]
        if isinstance(self._optimizer, MasterWeights):
            weights += [p for group in self._optimizer.inner.param_groups for p in group["params"]]
        return weights

    def _states(self) -> dict[Tensor, dict[str, Any]]:
        inner = self._optimizer.inner if isinstance(self._optimizer, MasterWeights) else self._optimizer
        return inner.state

    def _copy(self, value: Tensor) -> Tensor:
        _, copy = self._saved.get(id(value)) or (value, torch.empty_like(value))
        return copy.copy_(value)
