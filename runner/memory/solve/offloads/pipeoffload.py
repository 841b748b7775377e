"""The offload strategy that moves first what waits longest for its backward, over all stages of a rank."""

from __future__ import annotations

from runner.memory.solve.offload import Offload, first_layers, first_weights, move_all

__all__ = ["OFFLOAD"]


OFFLOAD = Offload(
    "pipeoffload",
    move_all,
    source="Wan et al. 2025, PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization",
    about="the first layers of the stages whose micro-batches wait longest are moved, as few as fit into memory_limit",
    candidates=first_layers("pipeoffload"),
    choose_weights=first_weights,
    by_lifetime=True,
)
