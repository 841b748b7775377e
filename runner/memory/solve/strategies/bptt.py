"""Backpropagation through time in little memory: hidden or internal states of equal steps are kept.

The layers of a stage are the steps. A hidden state is a layer's input; an internal state is all that autograd saves of
a layer. Memory is counted in hidden states, of which an internal state is as many as the profile says.

Source: A. Gruslys et al. 2016, Memory-Efficient Backpropagation Through Time, NeurIPS.
"""

from __future__ import annotations

from typing import NamedTuple

from runner.errors import did_you_mean
from runner.memory.solve.build import Cut, Keep, program_of
from runner.memory.solve.strategy import Strategy
from runner.memory.solve.values import ChainProgram, StageChain
from runner.options import Option

__all__ = ["STRATEGY"]

_VARIANTS = ("hsm", "ism", "msm")


class _Left(NamedTuple):
    """What is left to the layers that follow.

    Args:
        memory: hidden states that may still be kept.
        keep: whether the internal state of the next layer is kept, as was decided with the layers before it.
    """

    memory: int
    keep: bool = False


def _solve(chain: StageChain) -> ChainProgram:
    from runner.memory.solve.solvers.steps import StepPlan, Stored, Variant

    size = _internal_states(chain)
    plan = StepPlan(len(chain.layers), chain.options["states"], size, Variant(chain.options["variant"]))

    def decide(first: int, last: int, left: _Left) -> Cut[_Left] | Keep[_Left]:
        if left.keep or first == last:
            return Keep(first, _Left(left.memory - size if left.keep else left.memory))
        what, step = plan.choice(last - first + 1, left.memory)
        if what is Stored.HIDDEN:
            return Cut(first + step - 1, _Left(left.memory), _Left(left.memory - 1))
        if step == 1:
            return Keep(first, _Left(left.memory - size))
        return Cut(first + step - 2, _Left(left.memory), _Left(left.memory, keep=True))

    return program_of(chain.first, chain.last, _Left(chain.options["states"]), decide)


def _internal_states(chain: StageChain) -> int:
    """The largest internal state in hidden states, rounded up."""
    hidden = max(1, *(layer.output_bytes for layer in chain.layers))
    return max(1, -(-max(layer.saved_bytes for layer in chain.layers) // hidden))


STRATEGY = Strategy(
    "bptt",
    _solve,
    source="Gruslys et al. 2016, Memory-Efficient Backpropagation Through Time",
    about="layers are equal steps; hidden or internal states are kept as long as there is memory for them",
    options=(
        Option(
            "states",
            int,
            "memory of a stage, in inputs of one layer",
            example="8",
            rule="must be at least 1",
            breaks=lambda states: states < 1,
            fix="1",
        ),
        Option(
            "variant",
            str,
            "what is kept: hsm, hidden states (inputs of layers); ism, internal states (graphs of layers); msm, either",
            example="msm",
            rule=f"must be one of {', '.join(_VARIANTS)}",
            breaks=lambda variant: variant not in _VARIANTS,
            fix=lambda variant: did_you_mean(variant, _VARIANTS) or "",
        ),
    ),
)
