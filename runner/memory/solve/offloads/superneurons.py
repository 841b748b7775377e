"""The offload strategy that moves what heavy layers save, and runs the light layers between them forward again.

Heavy layers train a matrix or a kernel: convolutions, linear layers, attention. Runs of light ones, such as norms,
activations, pools and dropout, are computed again from the output of the heavy layer before them, in one of two ways:

- for speed: a run is computed again once, and what it saves is alive together;
- for memory: it is computed again up to each of its layers, so that only one layer's tensors are alive.

By cost, a run is computed for speed if what it saves is not more than the layer that needs most memory, which is needed
in any case, and for memory if it is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from runner.memory.solve.offload import Offload, moving
from runner.memory.solve.program import DEEPEST
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, Segment, StageChain
from runner.profile import LayerProfile

__all__ = ["OFFLOAD"]

_AXES_OF_A_MATRIX = 2


def _candidates(chain: StageChain, program: ChainProgram) -> Iterator[Candidate]:
    heavy = [at for at, layer in zip(chain.indices, chain.layers, strict=True) if _is_heavy(layer)]
    most = max(layer.saved_bytes + layer.forward_transient_bytes for layer in chain.layers)

    def exceeds(first: int, last: int) -> bool:
        return sum(layer.saved_bytes for layer in chain.profile.layers[first : last + 1]) > most

    yield Candidate("superneurons, all kept", moving(program, ()))
    yield Candidate("superneurons, moved", moving(program, heavy))
    yield Candidate("superneurons, again for speed", _program(chain, lambda first, last: False))
    yield Candidate("superneurons, again by cost", _program(chain, exceeds))
    yield Candidate("superneurons, again for memory", _program(chain, lambda first, last: True))


def _is_heavy(layer: LayerProfile) -> bool:
    return any(len(shape) >= _AXES_OF_A_MATRIX for shape in layer.trained_shapes)


def _program(chain: StageChain, for_memory: Callable[[int, int], bool]) -> ChainProgram:
    """Heavy layers are moved, and runs of light ones computed again.

    Args:
        chain: the stage.
        for_memory: whether a run, from its first to its last layer, is computed again up to each of its layers.
    """
    made: list[Segment] = []
    for heavy, found in groupby(chain.indices, key=lambda at: _is_heavy(chain.profile.layers[at])):
        run = list(found)
        if heavy:
            made += [Segment(at, at, moved=True) for at in run]
            continue
        inside = _up_to_each(run[0], run[-1]) if len(run) < DEEPEST and for_memory(run[0], run[-1]) else ()
        made.append(Segment(run[0], run[-1], recompute=True, inside=inside, moved=True))
    return tuple(made)


def _up_to_each(first: int, last: int) -> ChainProgram:
    """The second run of layers of which only the last keeps what it saves; those before it are run a third time."""
    if first == last:
        return ()
    before = Segment(first, last - 1, recompute=True, inside=_up_to_each(first, last - 1))
    return before, Segment(last, last)


OFFLOAD = Offload(
    "superneurons",
    lambda chain, program: _program(chain, lambda first, last: False),
    source="Wang et al. 2018, SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks",
    about="what layers with matrices or kernels save is moved, and the light layers between them are run again",
    candidates=_candidates,
    alone=True,
)
