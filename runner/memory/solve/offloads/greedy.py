"""The offload strategy that moves the first layers of a stage, as many as memory_limit asks for."""

from __future__ import annotations

from runner.memory.solve.offload import Offload, first_layers, first_weights, move_all

__all__ = ["OFFLOAD"]


OFFLOAD = Offload(
    "greedy",
    move_all,
    source="Beaumont et al. 2020, Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training",
    about="the first layers are moved, as few as fit into memory_limit: they are away for the longest time",
    candidates=first_layers("greedy"),
    choose_weights=first_weights,
)
