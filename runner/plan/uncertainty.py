"""How far a predicted step may be off, and two must be apart before a note says that one of them is shorter."""

from __future__ import annotations

from math import hypot

from runner.config.schema import RunConfig
from runner.plan.memory.limits import ranks_of_a_node
from runner.profile import ModelProfile

__all__ = ["USUAL_GAIN", "expected_seconds", "least_gain"]

USUAL_GAIN = 0.1
"""The share of a step below which a gain is not told."""

# Where ranks take all cores of a machine, whatever else runs there takes turns with them: messages are late, and an
# order with shorter idle times gains less than it has in them. Five pairs of runs of two ranks on two cores, predicted
# to be 21 to 29 % shorter with chimera than with 1f1b, took 218 ms a step on average with the one as with the other.
_WITHOUT_A_SPARE_CORE = 0.3


def least_gain(config: RunConfig, cores: int | None, *, accelerated: bool) -> float:
    """The share of a step below which a gain is not told.

    Args:
        config: the request.
        cores: cores of the machine of the ranks, if it is this one; None if the plan does not count them.
        accelerated: whether the ranks compute on an accelerator.
    """
    here = config.hardware.name == "auto" and config.launcher.name == "local" and not accelerated
    ranks = ranks_of_a_node(config)
    full = cores is not None and ranks > 1 and ranks * config.trainer.threads >= cores
    return _WITHOUT_A_SPARE_CORE if here and full else USUAL_GAIN


_ESTIMATED = 0.4  # of seconds from FLOPs: kernels reach more or less of a device's peak than is assumed
_ENGINE_SECONDS = 5e-3  # the most that rehearsals of small models on a CPU took for an action beside its layers
_LOOP_SECONDS = 5e-3  # the most that Lightning's loop, with loggers and callbacks, took there around a step


def expected_seconds(
    seconds: float, profile: ModelProfile, gain: float, *, actions: int, accelerated: bool
) -> tuple[float, float]:
    """Between which seconds a step is expected that was predicted without a rehearsal.

    Measured layers vary by what their repeats did and by what other work took meanwhile; ranks that compute together
    change each other's seconds by about :func:`least_gain`. Not in the prediction are the
    engine's own time on a CPU and that of the loop around a step. The wait for a batch is not expected, either.

    Args:
        seconds: the prediction.
        profile: where its seconds are from.
        gain: what :func:`least_gain` says.
        actions: the most actions of a rank.
        accelerated: whether the ranks compute on an accelerator.
    """
    if profile.seconds_source == "estimated":
        return seconds * (1 - _ESTIMATED), seconds * (1 + _ESTIMATED)
    share = hypot(profile.spread, profile.busy_share, gain)
    engine = _LOOP_SECONDS + (0.0 if accelerated else actions * _ENGINE_SECONDS)
    return seconds / (1 + share), seconds * (1 + share) + engine
