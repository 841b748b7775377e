"""The offload strategy that moves nothing, what convolutions save, or everything, as memory_limit asks for."""

from __future__ import annotations

from collections.abc import Iterator

from runner.memory.solve.offload import Offload, moving
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, StageChain
from runner.profile import LayerProfile

__all__ = ["OFFLOAD"]

_AXES_OF_A_KERNEL = 3  # at least: channels out, channels in, and one axis of positions


def _candidates(chain: StageChain, program: ChainProgram) -> Iterator[Candidate]:
    convolutions = [at for at, layer in zip(chain.indices, chain.layers, strict=True) if _convolves(layer)]
    yield Candidate("vdnn of nothing", moving(program, ()))
    yield Candidate("vdnn of convolutions", moving(program, convolutions))
    yield Candidate("vdnn of everything", moving(program, chain.indices))


def _convolves(layer: LayerProfile) -> bool:
    """Whether a layer trains a weight with the axes of a convolution's kernel."""
    return any(len(shape) >= _AXES_OF_A_KERNEL for shape in layer.trained_shapes)


OFFLOAD = Offload(
    "vdnn_dynamic",
    lambda chain, program: moving(program, chain.indices),
    source="Rhu et al. 2016, vDNN: Virtualized Deep Neural Networks for Memory-Efficient Neural Network Design",
    about="nothing, what layers with convolutions save, or what all layers save is moved, as memory_limit asks for",
    candidates=_candidates,
)
