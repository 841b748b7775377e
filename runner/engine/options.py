"""The settings of a run for its engine, and the results of each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from runner.engine.loss_scale import LossScaling
from runner.model.figures import Figure
from runner.model.metrics import Metric

__all__ = ["EngineOptions", "FinishedStep", "TakenBack"]


@dataclass(frozen=True)
class EngineOptions:
    """The settings of a run for its engine.

    Args:
        microbatches: number of micro-batches per optimizer step and replica.
        shares: the share of each of them in the replica's samples; empty: all are alike.
        dtype: dtype of weights and, without ``autocast``, activations.
        seed: seed of random layers.
        clip_norm: largest global gradient norm, or None.
        clip_value: largest element of a gradient, or None.
        autocast: format of the forwards' matrix products, or None.
        scaling: settings of loss scaling, or None.
        skip_nonfinite: whether a step whose loss or gradients are not finite, or in which nothing counts, is skipped,
            on every rank, instead of ending the run. With ``scaling``, overflows are skipped anyway until the scale is
            at its minimum.
        compile: whether the layers are compiled.
        compile_share: the share of activations that compiled layers keep; None = torch's own choice.
        post_validation: whether ranks update without waiting for each other; see
            :mod:`runner.engine.update.stage_update`.
        warmup_steps: number of first steps after each of which the pipeline is drained, so that they are synchronous.
        rescheduling_steps: the number of steps after the warm-up during which the learning rate of a late stage grows
            from a part of it to the whole, in an asynchronous schedule; None: it is always the whole.
        tensor_sums: how ranks that divide layers sum, see :class:`runner.engine.transport.tensor_group.TensorGroup`.
        twin_check_every: steps between two comparisons of the copies of weights on several ranks.
        link_delay_seconds: delay that is added to every message between ranks, for experiments.
        link_bytes_per_second: speed to which messages are slowed down, for experiments; None: they are not.
        link_between: delay and speed from one rank to another, instead of these two; None: all links are alike.
        speeds: how fast each pipeline rank computes, in parts of its real speed, for experiments; empty: as it is.
        offload_delay_seconds: delay that is added to every move of activations to the host or back, for experiments.
        offload_drive: folder of a drive in whose files moved activations or weights lie; None: they are in host memory.
        offload_bytes_per_second: speed to which these moves are slowed down, for experiments; None: they are not.
        metrics: what is measured at validations beside the loss; the same on every rank.
        figures: what the loss function computes beside the loss in training; the same on every rank.
        sizes_vary: whether what passes between stages may have other shapes and plain values for inputs of the same
            shapes. Each message then follows one that describes it.
        scatters: whether each of the ranks that divide layers sends a part of what passes between stages.
    """

    microbatches: int
    shares: tuple[float, ...] = ()
    dtype: torch.dtype = torch.float32
    seed: int = 0
    clip_norm: float | None = None
    clip_value: float | None = None
    autocast: torch.dtype | None = None
    scaling: LossScaling | None = None
    skip_nonfinite: bool = False
    compile: bool = False
    compile_share: float | None = None
    post_validation: bool = False
    warmup_steps: int = 0
    rescheduling_steps: int | None = None
    tensor_sums: str = "auto"
    twin_check_every: int = 100
    link_delay_seconds: float = 0.0
    link_bytes_per_second: float | None = None
    link_between: Callable[[int, int], tuple[float, float | None]] | None = None
    speeds: tuple[float, ...] = ()
    offload_delay_seconds: float = 0.0
    offload_bytes_per_second: float | None = None
    offload_drive: Path | None = None
    metrics: tuple[Metric, ...] = ()
    figures: tuple[Figure, ...] = ()
    sizes_vary: bool = False
    scatters: bool = False


@dataclass(frozen=True)
class FinishedStep:
    """The result of one optimizer step, the same on every rank.

    Args:
        loss: mean over the step's samples (Σ sum / Σ weight); NaN if nothing counts.
        grad_norm: global norm before clipping; None if nothing clips, and with post-validation, which knows it only a
            step later.
        stop: whether some rank asked to stop after this step; all ranks learn it with the same step.
        save: whether some rank asked to save after this step; likewise.
        skipped: whether the loss or a gradient was not finite, or nothing counted, so that the weights are those of the
            step before; with post-validation, :class:`TakenBack` reports gradients.
        loss_scale: the factor by which this step's loss was scaled; None if losses are not scaled.
        figures: the values over the step's samples of the figures of the options; empty if the step was passed over.
        samples: the number of samples that they are over.
    """

    step: int
    loss: float
    grad_norm: float | None
    stop: bool = False
    save: bool = False
    skipped: bool = False
    loss_scale: float | None = None
    figures: tuple[float, ...] = ()
    samples: int = 0


@dataclass(frozen=True)
class TakenBack:
    """A step that post-validation has undone after it was reported, and corrected.

    Args:
        skipped: whether the step was skipped because a gradient was not finite; otherwise it was repeated with clipped
            gradients.
        grad_norm: global norm before clipping, if it is finite and something clips.
    """

    step: int
    skipped: bool
    grad_norm: float | None
