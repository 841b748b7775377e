"""The offload strategy that moves the first layers of a stage, as many as memory_limit asks for."""

from __future__ import annotations

from runner.memory.solve.offload import Offload, moving, prefixes

__all__ = ["OFFLOAD"]


OFFLOAD = Offload(
    "greedy",
    lambda chain, program: moving(program, chain.indices),
    source="Beaumont et al. 2020, Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training",
    about="the first layers are moved, as few as fit into memory_limit: they are away for the longest time",
    candidates=lambda chain, program: prefixes("greedy", program, chain.indices),
)
