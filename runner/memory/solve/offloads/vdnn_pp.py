"""The offload strategy that chooses as vDNN does, and moves several layers' tensors at a time where there is memory."""

from __future__ import annotations

from collections.abc import Iterator

from runner.memory.solve.offload import Offload, move_all
from runner.memory.solve.offloads.vdnn_dynamic import choices
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, StageChain

__all__ = ["OFFLOAD"]


def _candidates(chain: StageChain, program: ChainProgram) -> Iterator[Candidate]:
    """What vDNN offers, and the same without its waits."""
    yield from choices("vdnn_pp", chain, program, one_by_one=False)
    yield from choices("vdnn", chain, program, one_by_one=True)


OFFLOAD = Offload(
    "vdnn_pp",
    move_all,
    source="Shriram et al. 2019, Dynamic Memory Management for GPU-based Training of Deep Neural Networks (vDNN++)",
    about="as vdnn_dynamic, but layers do not wait until what the layer before has saved has left the device",
    candidates=_candidates,
)
