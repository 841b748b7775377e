"""How far two predicted steps must be apart before a note says that one of them is shorter."""

from __future__ import annotations

from runner.config.schema import RunConfig
from runner.plan.memory.limits import ranks_of_a_node

__all__ = ["least_gain"]

_USUAL = 0.1
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
    return _WITHOUT_A_SPARE_CORE if here and full else _USUAL
