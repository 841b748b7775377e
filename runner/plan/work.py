"""What an optimizer step computes, and how fast: samples, tokens, floating-point operations."""

from __future__ import annotations

from dataclasses import dataclass

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.profile import ModelProfile

__all__ = ["Work", "work_of"]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one optimizer step over all ranks.

    Args:
        samples: samples of a step.
        tokens: tokens of a step; None if a sample is not a sequence of tokens.
        flops: floating-point operations of the model in a step, without recomputation.
        peak_flops: FLOP/s of all devices together at their peak; None if it is not known.
    """

    samples: int = 0
    tokens: int | None = None
    flops: float = 0.0
    peak_flops: float | None = None

    def samples_per_second(self, seconds: float | None) -> float | None:
        """Samples per second with steps of so many seconds; None if the seconds are not known."""
        return self.samples / seconds if seconds else None

    def tokens_per_second(self, seconds: float | None) -> float | None:
        """Tokens per second with steps of so many seconds; None if a sample is not a sequence of tokens."""
        return self.tokens / seconds if self.tokens and seconds else None

    def mfu(self, seconds: float | None) -> float | None:
        """Model FLOPs utilization with steps of so many seconds, from 0 to 1; None if the peak is not known."""
        return self.flops / seconds / self.peak_flops if self.peak_flops and seconds else None


def work_of(config: RunConfig, profile: ModelProfile) -> Work:
    """The work of a step of a request; the FLOPs of the profiled micro-batch are scaled to the samples of a step.

    A layer that ranks divide has one rank's in the profile, and one that each of them has whole is computed alike.
    """
    samples, degrees = config.data.batch_size, config.parallelism
    flops = 0.0
    for row in (*profile.layers, profile.loss):
        ranks = degrees.tensor if row.forward_exchanges or row.backward_exchanges else 1
        flops += ranks * (row.forward_flops + row.backward_flops)
    peak = config.hardware.flops.get(PRECISIONS[config.precision.name].arithmetic)
    return Work(
        samples=samples,
        tokens=profile.tokens_per_sample * samples if profile.tokens_per_sample else None,
        flops=flops * samples / profile.samples,
        peak_flops=peak * degrees.pipeline * degrees.data * degrees.tensor if peak else None,
    )
