"""Twin flow: a part of the offloaded optimizer states stays on the device and is updated there.

DeepSpeed assigns whole sub-groups of weights to device or host, and counts sub-groups. Here every weight is a sub-group
(``sub_group_size`` is 1) and elements are counted, so ``offload.ratio`` is exact up to one weight. torch's AdamW
updates the part on the device, DeepSpeedCPUAdam the part on the host.

Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, ``subgroup_to_device`` and ``backup_optimizer``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["TwinFlow", "device_weights"]

_ROUNDING = 1e-6  # a number of elements; with it, 0.7 of ten weights are seven


def device_weights(sizes: Sequence[int], ratio: float) -> int:
    """How many of a stage's first weights keep their states on the device: at most ``1 - ratio`` of all elements.

    Args:
        sizes: elements of every trained weight, in order.
        ratio: the share of the elements that is offloaded, in (0, 1].
    """
    room = (1 - ratio) * sum(sizes) + _ROUNDING
    return sum(end <= room for end in itertools.accumulate(sizes))


class TwinFlow:
    """The states of one stage on device and host, seen as one.

    Args:
        sizes: elements of every trained weight of the stage, in order.
        ratio: the requested ratio.
    """

    def __init__(self, sizes: Sequence[int], ratio: float) -> None:
        self.on_device = device_weights(sizes, ratio)
        self.ratio_of_groups = 1 - (self.on_device + 0.5) / len(sizes)
        """The ratio to give to DeepSpeed, so that it keeps exactly ``on_device`` sub-groups on the device."""
        self._outer: Any = None

    def attach(self, outer: Any) -> None:
        """Take over DeepSpeed's optimizer: all states are then found in one place, whichever side updates them."""
        self._outer = outer
        outer.backup_optimizer.state = outer.optimizer.state
        for group in range(self.on_device):
            if outer.subgroup_to_device[group] == "cpu":  # on a CPU, device and host would have the same name
                outer.subgroup_to_device[group] = "cpu:0"

    def follow(self) -> None:
        """Copy the host optimizer's settings to the device's, because DeepSpeed sets its learning rate only once."""
        for own, device in zip(
            self._outer.optimizer.param_groups, self._outer.backup_optimizer.param_groups, strict=True
        ):
            device.update({key: own[key] for key in ("lr", "betas", "eps", "weight_decay")})

    def flats(self) -> list[Tensor]:
        """The flat weights that are updated on the device."""
        flats: list[Tensor] = self._outer.fp32_partitioned_groups_flat[: self.on_device]
        return flats

    def restore_counters(self) -> None:
        """Convert the step counter of every loaded state to its side's type: a tensor for torch, a number for
        DeepSpeed.
        """
        state = self._outer.optimizer.state
        for number, flat in enumerate(self._outer.fp32_partitioned_groups_flat):
            steps = float(state[flat]["step"])
            state[flat]["step"] = torch.tensor(steps) if number < self.on_device else int(steps)
