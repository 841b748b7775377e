"""Takes weights out of an optimizer, with their states, and puts them into that of another rank.

The optimizers stay the objects that they are, because learning-rate schedulers and other code hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from runner.optim.states.master import MasterWeights

__all__ = ["put_in", "take_out"]


def take_out(optimizer: Optimizer, weight: Tensor) -> tuple[int, dict[str, Any]]:
    """Remove a weight from the optimizer, whose states must belong to single weights.

    Returns:
        the number of the weight's group, and its states, which are empty before the first update.
    """
    number = next(n for n, group in enumerate(optimizer.param_groups) if any(w is weight for w in group["params"]))
    held = optimizer.param_groups[number]["params"]
    held[:] = [each for each in held if each is not weight]
    if isinstance(optimizer, MasterWeights):
        optimizer.take_out(weight)
    return number, dict(optimizer.state.pop(weight, {}))


def put_in(optimizer: Optimizer, weight: Tensor, group: int, states: Mapping[str, Any]) -> None:
    """Let the optimizer update a further weight: the inverse of :func:`take_out`.

    Args:
        optimizer: has the same groups as that from which the weight comes.
        weight: the weight.
        group: the number of its group.
        states: its states.
    """
    optimizer.param_groups[group]["params"].append(weight)
    if isinstance(optimizer, MasterWeights):
        optimizer.put_in(weight, group, states)
    elif states:
        optimizer.state[weight] = dict(states)
