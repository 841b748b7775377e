"""The offload strategy that moves nothing, what convolutions save, or everything, as memory_limit asks for."""

from __future__ import annotations

from collections.abc import Iterator

from runner.memory.solve.offload import Offload, moving
from runner.memory.solve.offloads.vdnn_conv import convolutions
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, StageChain

__all__ = ["OFFLOAD", "choices"]


def choices(name: str, chain: StageChain, program: ChainProgram, *, one_by_one: bool) -> Iterator[Candidate]:
    """Programs that move nothing, what layers with convolutions save, and what all layers save.

    Args:
        name: the strategy's name.
        chain: the stage.
        program: the program of the activation policy.
        one_by_one: see :class:`runner.memory.solve.values.Segment`.
    """
    yield Candidate(f"{name} of nothing", moving(program, ()))
    yield Candidate(f"{name} of convolutions", moving(program, convolutions(chain), one_by_one=one_by_one))
    yield Candidate(f"{name} of everything", moving(program, chain.indices, one_by_one=one_by_one))


OFFLOAD = Offload(
    "vdnn_dynamic",
    lambda chain, program: moving(program, chain.indices, one_by_one=True),
    source="Rhu et al. 2016, vDNN: Virtualized Deep Neural Networks for Memory-Efficient Neural Network Design",
    about="nothing, what layers with convolutions save, or what all layers save is moved, as memory_limit asks for",
    candidates=lambda chain, program: choices("vdnn", chain, program, one_by_one=True),
)
