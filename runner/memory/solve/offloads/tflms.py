"""The offload strategy that moves what is away long enough, and searches how far ahead it comes back.

The distance of a tensor is the number of layers that run between its forward and its backward. Those above a threshold
are moved, as soon as their layer has run. In a chain the first layers have the largest distances, so that thresholds
are numbers of first layers. What is moved comes back ahead of its use, either one layer's tensors at a time, or as many
as the largest layer has moved: the first holds less, the second waits less. What a layer saves comes back as one.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.memory.solve.offload import Offload, first_weights, moving
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, StageChain

__all__ = ["OFFLOAD"]


def _candidates(chain: StageChain, program: ChainProgram) -> Iterator[Candidate]:
    yield Candidate("tflms of nothing", moving(program, ()))
    for count in range(1, len(chain.layers) + 1):
        for one_by_one, ahead in ((False, "several ahead"), (True, "one ahead")):
            moved = moving(program, chain.indices[:count], one_by_one=one_by_one)
            yield Candidate(f"tflms of {count}, {ahead}", moved)


OFFLOAD = Offload(
    "tflms",
    lambda chain, program: moving(program, chain.indices, one_by_one=True),
    source="Le et al. 2018, TFLMS: Large Model Support in TensorFlow by Graph Rewriting",
    about="what is away for longer than a threshold is moved, and how far ahead it comes back is searched with it",
    candidates=_candidates,
    choose_weights=first_weights,
)
