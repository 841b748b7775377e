"""The strategy that runs parts of a stage again, and within single layers only cheap operators.

It is rotor with several ways to keep a layer: all that its autograd saves, or the outputs of one of the presets of
operators, from which the rest is made again. Rockmate finds such ways by an integer program on each block's operators;
here they are the presets of the policy ``selective``, whose bytes and FLOPs every profile has.

Source: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont 2023, Rockmate: an Efficient, Fast, Automatic and Generic Tool
for Re-materialization in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from runner.memory.solve.save_ops import PRESETS
from runner.memory.solve.second_run import keeps_what_changes
from runner.memory.solve.strategies.full import STRATEGY as FULL
from runner.memory.solve.strategies.rotor import RESOLUTION, persistent_plan, programs_in_flight
from runner.memory.solve.strategies.rotor import STRATEGY as ROTOR
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import StageChain
from runner.profile import LayerProfile

if TYPE_CHECKING:
    from runner.memory.solve.solvers.in_flight import Partly
    from runner.memory.solve.solvers.persistent import PersistentPlan

__all__ = ["STRATEGY"]


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    """Rotor's programs, and those in which layers may keep the outputs of chosen operators."""
    assert ROTOR.candidates is not None
    yield from (Candidate("rockmate", each.program) for each in ROTOR.candidates(chain))
    plan = persistent_plan(chain)
    made = programs_in_flight(chain, plan, [_ways(chain.layers, at, plan) for at in range(len(chain.layers))])
    yield from (Candidate("rockmate", program) for program in dict.fromkeys(made))


def _ways(layers: Sequence[LayerProfile], at: int, plan: PersistentPlan) -> list[Partly]:
    """The presets that keep something of a layer that nothing changes, but not all that autograd saves of it."""
    from runner.memory.solve.solvers.in_flight import Partly

    layer, found = layers[at], []
    for preset in PRESETS:
        known = layer.recomputation.get(preset)
        if known is None or not (known.kept_bytes or known.keeps_output):
            continue
        if keeps_what_changes(layers, at, preset):
            continue
        share = known.recomputed_flops / layer.forward_flops if layer.forward_flops else 1.0
        seconds = layer.forward_seconds * (1 + share) + layer.backward_seconds
        found.append(Partly(preset, seconds, plan.units(known.kept_bytes + layer.output_bytes)))
    return found


STRATEGY = Strategy(
    "rockmate",
    FULL.solve,
    source="Zhao et al. 2023, Rockmate: an Efficient, Fast, Automatic and Generic Tool for Re-materialization",
    about="rotor, in which a layer may also keep the outputs of chosen operators and make the rest again",
    options=(RESOLUTION,),
    picks_operators=True,
    reads_budget=True,
    candidates=_candidates,
    chooses=True,
)
