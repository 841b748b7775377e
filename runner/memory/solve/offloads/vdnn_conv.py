"""The offload strategy that moves what layers with convolutions save, one layer after the other."""

from __future__ import annotations

from runner.errors import Problem, RequestError
from runner.memory.solve.offload import Offload, moving
from runner.memory.solve.values import ChainProgram, StageChain
from runner.profile import LayerProfile

__all__ = ["OFFLOAD", "convolutions"]

_AXES_OF_A_KERNEL = 3  # at least: channels out, channels in, and one axis of positions


def convolutions(chain: StageChain) -> list[int]:
    """The layers of a stage that train a convolution, as indices in the whole model."""
    return [at for at, layer in zip(chain.indices, chain.layers, strict=True) if _convolves(layer)]


def _convolves(layer: LayerProfile) -> bool:
    """Whether a layer trains a weight with the axes of a convolution's kernel."""
    return any(len(shape) >= _AXES_OF_A_KERNEL for shape in layer.trained_shapes)


def _move(chain: StageChain, program: ChainProgram) -> ChainProgram:
    if not any(map(_convolves, chain.profile.layers)):
        rule, why = "must be another for a model without convolutions", "It moves what layers with convolutions save"
        raise RequestError([Problem("offload.activations", "vdnn_conv", rule, why, "offload=activations_vdnn_all")])
    return moving(program, convolutions(chain), one_by_one=True)


OFFLOAD = Offload(
    "vdnn_conv",
    _move,
    source="Rhu et al. 2016, vDNN: Virtualized Deep Neural Networks for Memory-Efficient Neural Network Design",
    about="what layers that train a convolution save is moved, one layer's tensors at a time in each direction",
)
