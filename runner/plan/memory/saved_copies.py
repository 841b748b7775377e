"""The copies that a rank holds while a checkpoint is written in the background: those of its part of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from runner.plan.stages.figures import StageFigures
from runner.plan.values import MemoryParts
from runner.profile import ModelProfile

__all__ = ["saved_copies"]


def saved_copies(states: MemoryParts, stages: Sequence[StageFigures], profile: ModelProfile, replicas: int) -> int:
    """The bytes of weights and optimizer states that a replica saves of some stages, if it is the one that saves most.

    Each weight, and each weight's states, go to the replica that has the fewest bytes so far.

    Args:
        states: what every replica holds of these stages.
        stages: the figures of these stages.
        replicas: how many share the saving.
    """
    last = len(profile.layers) - 1
    layers = [layer for stage in stages for layer in profile.layers[stage.first : stage.last + 1]]
    layers += [profile.loss for stage in stages if stage.last == last]
    trained, every = list[float](), list[float]()
    for layer in layers:
        elements = [math.prod(shape) for shape in layer.trained_shapes] or [layer.num_trained]
        a_byte = layer.gradient_bytes / max(sum(elements), 1)  # a gradient is as large as its weight
        own = [each * a_byte for each in elements]
        trained += own
        every += [*own, layer.weight_bytes - layer.gradient_bytes]  # frozen weights and buffers, as if they were one
    return math.ceil(
        _largest_part(every, replicas) * states.weights + _largest_part(trained, replicas) * states.optimizer
    )


def _largest_part(sizes: Iterable[float], replicas: int) -> float:
    """The largest part of the whole that one of the replicas has, if each next one goes to the one that has least."""
    held = [0.0] * replicas
    for size in sizes:
        held[held.index(min(held))] += size
    return max(held) / (sum(held) or 1.0)
