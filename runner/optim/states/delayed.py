"""Delayed parameter update: the host updates while the device computes; an update takes effect one step late.

From a given step on, ``w[i+1] = w[i] - update(g[i-1])``: the gradients of step i go to a thread that updates copies of
the weights during step i + 1, and at its end the copies become the weights. The arithmetic is that of the wrapped
optimizer on the same numbers, so the result equals the recursion's bit for bit, whichever side is faster. The gradients
of the last step never take effect, unless a later run goes on from its checkpoint: the copies and the number of updates
are in the optimizer's states, so that an update that is under way is drained into the checkpoint.

Source: Ren et al. 2021, "ZeRO-Offload", section 5.2. DeepSpeed 0.19.8 has no switch for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

__all__ = ["DELAYED", "DelayedUpdate"]

_PENDING, _STEPS = "pending_weights", "delayed_steps"

DELAYED = frozenset({_PENDING, _STEPS})
"""The states of a weight that a delayed update adds to those of its optimizer; others have no use for them."""

Build = Callable[[list[Tensor]], Optimizer]


class DelayedUpdate(Optimizer):
    """Wraps any torch optimizer. Other code may replace the weights in its groups, as ZeRO does with its partitions.

    Args:
        parameters: the parameters, which form one group.
        build: makes the wrapped optimizer over copies of a group's weights.
        first: the first step whose update is delayed, from 0; earlier updates take effect at once.
    """

    def __init__(self, parameters: Sequence[Tensor], build: Build, *, first: int) -> None:
        super().__init__(list(parameters), dict(build([torch.zeros(1, requires_grad=True)]).defaults))
        self._build = build
        self._first = first
        self._slots: dict[tuple[int, ...], _Slot] = {}
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delayed-update")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Let the pending update take effect, and start the update of the present gradients."""
        result = closure() if closure is not None else None
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            key = tuple(map(id, trained))
            if key not in self._slots:
                self._slots[key] = _Slot(trained, self._build, self.state)
            slot = self._slots[key]
            slot.take_effect()
            slot.hand_over({name: value for name, value in group.items() if name != "params"})
            if slot.steps < self._first:
                slot.update()
                slot.publish()
            else:
                slot.pending = self._worker.submit(slot.update)
            slot.steps += 1
            self.state.update(slot.states())
        return result

    def settle(self) -> None:
        """Wait for pending updates; this does not make them take effect."""
        for slot in self._slots.values():
            if slot.pending is not None:
                slot.pending.result()


class _Slot:
    """Copies of one group's weights, and their optimizer."""

    def __init__(self, parameters: Sequence[Tensor], build: Build, states: Mapping[Tensor, dict[str, Any]]) -> None:
        self.steps = 0
        self.pending: Future[None] | None = None
        self._parameters = list(parameters)
        self._copies = [Parameter(parameter.detach().clone()) for parameter in parameters]
        self._optimizer = build(list(self._copies))
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            if _PENDING in (state := states.get(parameter, {})):
                self._go_on(copy, state)

    def _go_on(self, copy: Parameter, state: Mapping[str, Any]) -> None:
        """Take over a weight's states from a checkpoint, with the update that was under way; it takes effect next."""
        copy.data.copy_(state[_PENDING])
        self._optimizer.state[copy] = {key: value for key, value in state.items() if key not in DELAYED}
        self.steps = int(state[_STEPS])
        self.pending = Future()
        self.pending.set_result(None)

    def take_effect(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None
            self.publish()

    def hand_over(self, settings: dict[str, Any]) -> None:
        """Copy the gradients, and the settings (learning rate, …) that belong to them."""
        for group in self._optimizer.param_groups:
            group.update(settings)
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            assert parameter.grad is not None
            if copy.grad is None:
                copy.grad = parameter.grad.clone()
            else:
                copy.grad.copy_(parameter.grad)

    def update(self) -> None:
        self._optimizer.step()

    def publish(self) -> None:
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.copy_(copy)

    def states(self) -> dict[Tensor, Any]:
        """The states by weight, with its copy and the number of updates; the wrapped optimizer has them by copy."""
        pairs = zip(self._parameters, self._copies, strict=True)
        own = {_STEPS: torch.tensor(self.steps)}
        return {
            parameter: self._optimizer.state[copy] | {_PENDING: copy.data} | own
            for parameter, copy in pairs
            if copy in self._optimizer.state
        }
