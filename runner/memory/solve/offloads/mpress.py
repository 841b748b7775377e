"""The offload strategy that keeps, moves or runs again each layer of every stage of a pipeline.

A rank whose program takes time may instead keep all and lend micro-batches: :mod:`runner.plan.search.peers`.
"""

from __future__ import annotations

from runner.memory.solve.each_layer import each_layer
from runner.memory.solve.offload import Offload, moving

__all__ = ["OFFLOAD"]


OFFLOAD = Offload(
    "mpress",
    lambda chain, program: moving(program, chain.indices),
    source="Zhou et al. 2023, MPress: Democratizing Billion-Scale Model Training on Multi-GPU Servers via "
    "Memory-Saving Inter-Operator Parallelism",
    about="each layer of each stage is kept, moved to the host or to another rank, or run again, whichever takes least "
    "time under memory_limit",
    candidates=each_layer("mpress"),
    alone=True,
    searches=True,
    peers=True,
)
