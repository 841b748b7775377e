"""The offload strategy that keeps, moves or runs again each layer of a stage, and moves boundaries between stages."""

from __future__ import annotations

from runner.memory.solve.each_layer import each_layer
from runner.memory.solve.offload import Offload, moving

__all__ = ["OFFLOAD"]


OFFLOAD = Offload(
    "vpipe",
    lambda chain, program: moving(program, chain.indices),
    source="Zhao et al. 2021, vPipe: A Virtualized Acceleration System for Achieving Efficient and Scalable Pipeline "
    "Parallel DNN Training",
    about="each layer is kept, moved or run again, and partition=auto moves layers between stages as that changes",
    candidates=each_layer("vpipe"),
    alone=True,
    searches=True,
    recuts=True,
)
