"""Twin flow: the part of offloaded optimizer states that stays on the device, and is updated there.

DeepSpeed gives whole sub-groups of weights to either side, and counts sub-groups. Here every weight is one
(``sub_group_size`` is 1) and elements are counted, so that ``offload.ratio`` is true to one weight. The device's part
is updated by torch's AdamW, the host's by DeepSpeedCPUAdam.

Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, ``subgroup_to_device`` and ``backup_optimizer``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["TwinFlow", "device_weights"]

_ROUNDING = 1e-6  # of an element: 0.7 of ten weights are seven


def device_weights(sizes: Sequence[int], ratio: float) -> int:
    """How many of a stage's first weights keep their states on the device: what ``1 - ratio`` of all elements holds.

    Args:
        sizes: elements of every trained weight, in order.
        ratio: the part of the elements that leaves, in (0, 1].
    """
    room = (1 - ratio) * sum(sizes) + _ROUNDING
    return sum(end <= room for end in itertools.accumulate(sizes))


class TwinFlow:
    """Both sides of one stage's states as one.

    Args:
        sizes: elements of every trained weight of the stage, in order.
        ratio: as requested.
    """

    def __init__(self, sizes: Sequence[int], ratio: float) -> None:
        self.on_device = device_weights(sizes, ratio)
        self.ratio_of_groups = 1 - (self.on_device + 0.5) / len(sizes)
        """What DeepSpeed is told, so that its whole part of the number of sub-groups is ours."""
        self._outer: Any = None

    def attach(self, outer: Any) -> None:
        """Take over DeepSpeed's optimizer: states are found in one place, whoever updates them."""
        self._outer = outer
        outer.backup_optimizer.state = outer.optimizer.state
        for group in range(self.on_device):
            if outer.subgroup_to_device[group] == "cpu":  # the device is a CPU, whose two sides would have one name
                outer.subgroup_to_device[group] = "cpu:0"

    def follow(self) -> None:
        """Give the device's optimizer the host's settings: DeepSpeed sets its learning rate once and for all."""
        for own, device in zip(
            self._outer.optimizer.param_groups, self._outer.backup_optimizer.param_groups, strict=True
        ):
            device.update({key: own[key] for key in ("lr", "betas", "eps", "weight_decay")})

    def flats(self) -> list[Tensor]:
        """The weights that the device updates."""
        flats: list[Tensor] = self._outer.fp32_partitioned_groups_flat[: self.on_device]
        return flats

    def restore_counters(self) -> None:
        """Give every loaded state its step as its side counts it: torch in a tensor, DeepSpeed in a number."""
        state = self._outer.optimizer.state
        for number, flat in enumerate(self._outer.fp32_partitioned_groups_flat):
            steps = float(state[flat]["step"])
            state[flat]["step"] = torch.tensor(steps) if number < self.on_device else int(steps)
