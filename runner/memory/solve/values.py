"""What a policy is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from runner.profile import LayerProfile

__all__ = ["ActivationPlan", "PolicyOptions", "Segment", "StageChain"]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """A policy by name with its options; None where an option is not the policy's.

    Args:
        name: of the policy.
        every: periodic: layers of one segment.
        save_ops: selective: which operators' outputs are kept, a name of :data:`runner.memory.solve.save_ops.PRESETS`.
        layers: manual: names or indices of the layers to compute again.
    """

    name: str = "none"
    every: int | None = None
    save_ops: str | None = None
    layers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class StageChain:
    """One stage as a policy sees it.

    Args:
        first: index of its first layer in the whole model.
        layers: profiles of its layers, in order.
    """

    first: int
    layers: tuple[LayerProfile, ...]

    @property
    def last(self) -> int:
        """Index of its last layer in the whole model."""
        return self.first + len(self.layers) - 1


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers that are treated as one.

    Args:
        first, last: indices in the whole model, inclusive.
        recompute: keep their common input only, and run them forward again before their backward.
        save_ops: operators whose outputs are kept although the others are computed again; None = of none.
    """

    first: int
    last: int
    recompute: bool = False
    save_ops: str | None = None


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """What becomes of every saved tensor.

    Args:
        stages: per stage, its segments in order; together they are its layers.
        to_host: saved tensors of the stages' layers leave the device between forward and backward.
    """

    stages: tuple[tuple[Segment, ...], ...]
    to_host: bool = False
