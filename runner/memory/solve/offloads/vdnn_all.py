"""The offload strategy that moves what every layer saves, one layer after the other."""

from __future__ import annotations

from runner.memory.solve.offload import Offload, moving

__all__ = ["OFFLOAD"]

OFFLOAD = Offload(
    "vdnn_all",
    lambda chain, program: moving(program, chain.indices, one_by_one=True),
    source="Rhu et al. 2016, vDNN: Virtualized Deep Neural Networks for Memory-Efficient Neural Network Design",
    about="what every layer saves is moved, and at most one layer's tensors are on their way in each direction",
)
