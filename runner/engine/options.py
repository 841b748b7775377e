"""What a run fixes for its engine, and what the engine says of each step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runner.engine.update.loss_scale import LossScaling

__all__ = ["EngineOptions", "FinishedStep", "TakenBack"]


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
        post_validation: the ranks do not wait for each other before they update; see
            :mod:`runner.engine.update.stage_update`.
        twin_check_every: steps between two comparisons of the twins of several pipelines.
        link_delay_seconds: added to every message between ranks, for experiments.
        link_bytes_per_second: what messages are slowed down to, for experiments; None: not.
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
    post_validation: bool = False
    twin_check_every: int = 100
    link_delay_seconds: float = 0.0
    link_bytes_per_second: float | None = None


@dataclass(frozen=True)
class FinishedStep:
    """One optimizer step's result, the same on every rank.

    Args:
        loss: mean over the step's samples (Σ sum / Σ weight).
        grad_norm: global norm before clipping; None where nothing clips, and with post-validation, where it is known
            a step later.
        stop: some rank asked to stop after this step; all ranks learn it with the same step.
        skipped: the loss or a gradient was not finite, and the weights are those of the step before; with
            post-validation :class:`TakenBack` tells of gradients.
        loss_scale: that this step's loss was scaled with; None where losses are not scaled.
    """

    step: int
    loss: float
    grad_norm: float | None
    stop: bool = False
    skipped: bool = False
    loss_scale: float | None = None


@dataclass(frozen=True)
class TakenBack:
    """A step that post-validation took back after it was reported, and did again as the verdict says.

    Args:
        skipped: a gradient was not finite; otherwise the gradients were clipped.
        grad_norm: global norm before clipping, where it is finite and something clips.
    """

    step: int
    skipped: bool
    grad_norm: float | None
