"""Notes about layers that have kernels of torch's, or that ranks divide."""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.units import format_seconds
from runner.plan.time.network import Network
from runner.plan.time.tensor import exchange_seconds
from runner.profile import ModelProfile

__all__ = ["draw_problem", "part_notes"]

_MOST_NAMED = 3


def part_notes(profile: ModelProfile, ranks: int, per_node: int | None, network: Network) -> Iterator[str]:
    """Yield notes about what has other kernels, what is divided, what stays whole, and what ranks draw by themselves.

    Args:
        profile: a rank's profile.
        ranks: the number of ranks that divide each layer.
        per_node: neighbouring ranks that exchange without the network; None: all.
        network: the links between ranks.
    """
    if profile.substituted:
        yield f"kernels replaces in layers that differ: {', '.join(profile.substituted)}"
    if profile.own_kernels:
        yield "not all of the model has the kernels that are asked for" + _listed(profile, "own_kernels")
    if ranks == 1:
        return
    divided = profile.parameters_elsewhere * ranks / (ranks - 1) / max(1, profile.num_parameters)
    told = f"{ranks} ranks divide {min(divided, 1.0):.0%} of the weights, each has the others whole"
    yield told + _listed(profile, "whole_weights")
    if profile.gathered_logits:
        name = profile.gathered_logits
        yield f"every rank gets all features of {name}: only what a plain cross-entropy alone reads stays divided"
    if profile.whole_tokens:
        yield "not all values between layers are divided by tokens" + _listed(profile, "whole_tokens")
    if per_node is not None and per_node % ranks:
        rows = (*profile.layers, profile.loss)
        exchanges = [each for row in rows for each in (*row.forward_exchanges, *row.backward_exchanges)]
        seconds = (exchange_seconds(exchanges, ranks, link) for link in (network.parts(ranks), network.inside))
        there, here = map(format_seconds, seconds)
        yield (
            f"{ranks} ranks that divide layers are not all on a node of {per_node}, and exchange over the network: a "
            f"micro-batch waits {there} for its exchanges, which would be {here} between neighbours; a number that "
            f"divides {per_node} keeps them together"
        )
    why = draw_problem(profile)
    if why is not None:
        yield f"{why}: losses are those of one process in distribution, not in numbers"


def _listed(profile: ModelProfile, key: str) -> str:
    reasons = profile.parts_named.get(key, ())
    left = len(reasons) - _MOST_NAMED
    more = f"; and {left} more, see {key} of runner plan --json" if left > 0 else ""
    return f": {'; '.join(reasons[:_MOST_NAMED])}{more}" if reasons else ""


def draw_problem(profile: ModelProfile) -> str | None:
    """Where each rank draws random numbers for its part of a layer, or None if nowhere."""
    names = [layer.name for layer in profile.layers if layer.draws_apart]
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"each rank draws dropout of its own for its parts of layer {names[0]}{more}"
