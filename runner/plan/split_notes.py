"""Tells what a schedule with split backwards cannot gain, because gradients of weights stay in I."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.profile import LayerProfile, ModelProfile
from runner.schedule.traits import traits_of
from runner.schedule.values import Schedule

__all__ = ["split_notes"]

_MATTERS = 0.05
"""The share of the backward of all stages but the first above which it is told."""

_WEIGHTS_SHOWN = 3


def split_notes(schedule: Schedule, profile: ModelProfile, partition: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """One note for each kind of layer of which a share of the backward stays in I; none if the whole share is small.

    The first stage does not count: no other stage waits for its I.
    """
    if len(partition) == 1 or not traits_of(schedule).splits_backward:
        return ()
    first = partition[1][0]
    layers = list(enumerate(profile.layers))[first:]
    whole = sum(layer.backward_seconds for _, layer in layers) + profile.loss.backward_seconds
    kept = sum(_kept_seconds(layer) for _, layer in layers)
    if not whole or kept / whole < _MATTERS:
        return ()
    head = (
        f"{kept / whole:.0%} of the backward makes gradients of weights that cannot wait, so that {schedule.name} has "
        "less to fill its bubbles with"
    )
    return head, *(_line(numbers, layer) for numbers, layer in _alike(layers))


def _kept_seconds(layer: LayerProfile) -> float:
    return layer.split.kept_share * layer.backward_seconds if layer.split is not None else 0.0


def _alike(layers: Sequence[tuple[int, LayerProfile]]) -> Iterator[tuple[list[int], LayerProfile]]:
    """Layers with the same reasons, and the one of them that keeps the largest share."""
    groups: dict[object, list[tuple[int, LayerProfile]]] = {}
    for number, layer in layers:
        if layer.split is not None and layer.split.kept_share >= _MATTERS:
            groups.setdefault(layer.split.kept, []).append((number, layer))
    for group in groups.values():
        yield [number for number, _ in group], max((layer for _, layer in group), key=_share)


def _share(layer: LayerProfile) -> float:
    return layer.split.kept_share if layer.split is not None else 0.0


def _line(numbers: Sequence[int], layer: LayerProfile) -> str:
    kept = layer.split.kept if layer.split is not None else ()
    shown = "; ".join(f"{name}: {reason}" for name, reason in kept[:_WEIGHTS_SHOWN])
    more = f"; and {len(kept) - _WEIGHTS_SHOWN} more" if len(kept) > _WEIGHTS_SHOWN else ""
    word = "layers" if len(numbers) > 1 else "layer"
    share = f"{'up to ' if len(numbers) > 1 else ''}{_share(layer):.0%}"
    return f"{word} {', '.join(map(str, numbers))}: {share} of the backward stays in I ({shown}{more})"
