"""The ways to keep what backwards need, as a planning problem has them: bytes and seconds of each layer in each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from runner.config.schema import RunConfig
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.policies import solve
from runner.memory.solve.values import ActivationPlan, PolicyOptions
from runner.plan.activations import plan_activations
from runner.plan.draft.draft import Draft
from runner.plan.planners.values import Kept, Line, Lines
from runner.profile import LayerProfile, ModelProfile

__all__ = ["ASKED", "SAVED_OPS", "lines", "merged", "moved_ways", "ways_to_keep"]

ASKED = "asked"
"""The name of the way to keep that the request itself names."""

SAVED_OPS = "matmuls"
"""The operators whose outputs ``activation_checkpoint=selective`` keeps unless others are named."""

_WAYS = ("none", "selective", "full")


def ways_to_keep(config: RunConfig, drafts: Sequence[Draft], given: Collection[str]) -> tuple[Kept, ...]:
    """The ways that the search may choose, the fastest first: the one that is asked for, else each that is worth it.

    Args:
        config: the request.
        drafts: one for each profiled size of micro-batches.
        given: the keys and groups that the user has chosen.
    """
    is_named = any(key.startswith("activation_checkpoint") for key in given)
    if is_named and config.activation_checkpoint.name != "none":
        return (_asked(config, drafts),)
    found: list[Kept] = []
    for name in ("none",) if is_named else _WAYS:
        profiles = [adjusted(draft.profile, _whole(draft.profile, name)) for draft in drafts]
        found.append(_kept(name, name != "selective", drafts, profiles))
    return tuple(each for each in found if not any(_is_no_better(each, other) for other in found))


def moved_ways(config: RunConfig, drafts: Sequence[Draft], ways: Sequence[Kept]) -> tuple[Kept, ...]:
    """The same ways if what they keep is in the host's memory meanwhile, as far as rules allow it and it is worth it.

    Args:
        config: the request, with moves.
        drafts: see :func:`ways_to_keep`.
        ways: the ways whose tensors stay on the device.
    """
    found = list[Kept]()
    for way in ways:
        if way.name == "selective":  # hooks do not see the outputs of single operators
            continue
        if way.name == ASKED:
            found.append(replace(_asked(config, drafts), moved=True))
            continue
        profiles = [adjusted(draft.profile, _whole(draft.profile, way.name, moved=True)) for draft in drafts]
        found.append(replace(_kept(way.name, way.by_stage, drafts, profiles), moved=True))
    return tuple(each for each in found if not any(_is_no_better(each, other) for other in (*ways, *found)))


def _asked(config: RunConfig, drafts: Sequence[Draft]) -> Kept:
    """The way that the request names."""
    whole = [(0, len(drafts[0].profile.layers) - 1)]
    made = [
        plan_activations(config, draft.profile, whole, on_accelerator=draft.needs.accelerated)[1] for draft in drafts
    ]
    return _kept(ASKED, False, drafts, made)


def _whole(profile: ModelProfile, name: str, *, moved: bool = False) -> ActivationPlan:
    options = PolicyOptions(name, None, save_ops=SAVED_OPS) if name == "selective" else PolicyOptions(name)
    return solve(profile, [(0, len(profile.layers) - 1)], options, offload=OFFLOADS["async"] if moved else None)


def _is_no_better(one: Kept, other: Kept) -> bool:
    """Whether another way is as fast and needs less."""
    return (
        one is not other
        and all(_total(other.saved, few) < _total(one.saved, few) for few in (1, 2**20))
        and sum(line.each for line in other.backward) <= sum(line.each for line in one.backward)
    )


def _kept(name: str, by_stage: bool, drafts: Sequence[Draft], profiles: Sequence[ModelProfile]) -> Kept:
    rows = [merged(each.layers, each.loss) for each in profiles]
    copies = [
        [draft.host_link.seconds(layer.moves.num_bytes) for layer in each]
        for draft, each in zip(drafts, rows, strict=True)
    ]

    def waiting(seconds: Callable[[LayerProfile], float]) -> Lines:
        """Seconds of a backward, with what it and the forward wait for the copies of the same layer."""
        found = []
        for each, own in zip(rows, copies, strict=True):
            pairs = zip(each, own, strict=True)
            found.append([max(seconds(row), copy) + max(copy - row.forward_seconds, 0.0) for row, copy in pairs])
        return lines(profiles, found)

    return Kept(
        name=name,
        by_stage=by_stage,
        saved=lines(profiles, [[layer.saved_bytes for layer in each] for each in rows]),
        left_to_w=lines(profiles, [[_left_to_w(layer) for layer in each] for each in rows]),
        working=lines(profiles, [[_working(layer) for layer in each] for each in rows]),
        backward=waiting(lambda layer: layer.backward_seconds),
        input_gradient=waiting(lambda layer: layer.split_seconds[0]),
        weight_gradient=lines(profiles, [[layer.split_seconds[1] for layer in each] for each in rows]),
    )


def _left_to_w(layer: LayerProfile) -> int:
    split = layer.split
    if split is None:
        return layer.saved_bytes
    return min(layer.saved_bytes, split.deferred_bytes + split.input_bytes + split.gradient_bytes)


def _working(layer: LayerProfile) -> int:
    """Bytes beside what is kept; of what moves, one layer's is on its way out and another one's has come back."""
    backward = max(layer.backward_transient_bytes, layer.inner_backward_bytes) + layer.gradient_of_output_bytes
    return max(layer.forward_transient_bytes, backward, 0) + 2 * layer.moves.num_bytes


def merged(layers: Sequence[LayerProfile], loss: LayerProfile) -> list[LayerProfile]:
    """The layers, the last with the loss in it."""
    last = layers[-1]
    of_loss, own = loss.split_seconds, last.split_seconds
    together = replace(
        last,
        saved_bytes=last.saved_bytes + loss.saved_bytes,
        forward_seconds=last.forward_seconds + loss.forward_seconds,
        backward_seconds=last.backward_seconds + loss.backward_seconds,
        input_gradient_seconds=own[0] + of_loss[0],
        weight_gradient_seconds=own[1] + of_loss[1],
        forward_transient_bytes=max(last.forward_transient_bytes, loss.forward_transient_bytes),
        backward_transient_bytes=max(last.backward_transient_bytes, loss.backward_transient_bytes),
    )
    return [*layers[:-1], together]


def _total(lines: Lines, samples: int) -> float:
    return sum(line.of(samples) for line in lines)


def lines(profiles: Sequence[ModelProfile], figures: Sequence[Sequence[float]]) -> Lines:
    """The lines through what was measured; of one size, through nothing at no samples."""
    few, many = profiles[0].samples, profiles[-1].samples
    if few == many:
        return tuple(Line(0.0, each / few) for each in figures[0])
    found = []
    for one, other in zip(figures[0], figures[-1], strict=True):
        each = max(other - one, 0.0) / (many - few)
        found.append(Line(max(one - few * each, 0.0), each))
    return tuple(found)
