"""What a run fixes for its engine, and what the engine says of each step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runner.engine.loss_scale import LossScaling

__all__ = ["EngineOptions", "FinishedStep"]


@dataclass(frozen=True)
class EngineOptions:
    """What a run fixes for its engine.

    Args:
        microbatches: per optimizer step and replica.
        dtype: of weights and, without ``autocast``, activations.
        seed: of random layers.
        clip_norm: largest global gradient norm, or None.
        clip_value: largest element of a gradient, or None.
        autocast: format of the forwards' matrix products, or None.
        scaling: of the loss, or None.
        skip_nonfinite: a step whose loss or gradients are not finite is skipped, on every rank, instead of ending the
            run. With ``scaling``, overflows are skipped anyway until the scale is at its minimum.
        compile: the layers are compiled.
    """

    microbatches: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    clip_norm: float | None = None
    clip_value: float | None = None
    autocast: torch.dtype | None = None
    scaling: LossScaling | None = None
    skip_nonfinite: bool = False
    compile: bool = False


@dataclass(frozen=True)
class FinishedStep:
    """One optimizer step's result, the same on every rank.

    Args:
        loss: mean over the step's samples (Σ sum / Σ weight).
        grad_norm: global norm before clipping; None where nothing clips.
        stop: some rank asked to stop after this step; all ranks learn it with the same step.
        skipped: the loss or a gradient was not finite, and the weights are those of the step before.
        loss_scale: that this step's loss was scaled with; None where losses are not scaled.
    """

    step: int
    loss: float
    grad_norm: float | None
    stop: bool = False
    skipped: bool = False
    loss_scale: float | None = None
