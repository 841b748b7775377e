"""The offload strategy that moves what every layer saves."""

from __future__ import annotations

from runner.memory.solve.offload import Offload, moving
from runner.memory.solve.values import ChainProgram, StageChain

__all__ = ["OFFLOAD"]


def _move(chain: StageChain, program: ChainProgram) -> ChainProgram:
    return moving(program, chain.indices)


OFFLOAD = Offload(
    "async",
    _move,
    source="torchtune's and TRL's OffloadActivations",
    about="what every layer saves is moved while later layers compute",
)
