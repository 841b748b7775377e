"""Reads profiles from JSON."""

from __future__ import annotations

import json
from typing import Any

from runner.profile.layer import (
    BoundaryTensor,
    Exchange,
    FillProfile,
    GradientPeaks,
    LayerProfile,
    Recomputation,
    SharedGradient,
    SplitBackward,
)
from runner.profile.model import ChangedState, ModelProfile, OddWeight, OwnUpdate, Rehearsal, SharedWeight

__all__ = ["PROFILE_FILE", "profile_from_json"]

PROFILE_FILE = "profile.json"


def profile_from_json(text: str) -> ModelProfile:
    """The inverse of :meth:`ModelProfile.to_json`. Raises TypeError or KeyError if it is not a profile."""
    document = json.loads(text)
    layers = tuple(_layer(layer) for layer in document.pop("layers"))
    shared = tuple(map(_shared, document.pop("shared", ())))
    shapes = tuple(map(tuple, document.pop("sample_shapes", ())))
    own_update = document.pop("own_update", None)
    document["own_update"] = OwnUpdate(**own_update) if own_update is not None else None
    document["rehearsals"] = tuple(Rehearsal(**each) for each in document.pop("rehearsals", ()))
    document["odd_weights"] = tuple(OddWeight(**each) for each in document.pop("odd_weights", ()))
    for names in (
        "changed_buffers",
        "shared_buffers",
        "unsaved_buffers",
        "whole_weights",
        "whole_tokens",
        "own_kernels",
        "substituted",
    ):
        document[names] = tuple(document.pop(names, ()))
    document["divided_shapes"] = tuple(map(tuple, document.pop("divided_shapes", ())))
    document["changed_states"] = tuple(ChangedState(**each) for each in document.pop("changed_states", ()))
    document.pop("first_backwards", None)  # a plan's own
    loss = _layer(document.pop("loss"))
    return ModelProfile(layers=layers, loss=loss, shared=shared, sample_shapes=shapes, **document)


def _shared(document: dict[str, Any]) -> SharedWeight:
    return SharedWeight(**{**document, "layers": tuple(document["layers"]), "shape": tuple(document.get("shape", ()))})


def _layer(document: dict[str, Any]) -> LayerProfile:
    made_again = {
        name: Recomputation(**{**figures, "unread": tuple(figures.get("unread", ()))})
        for name, figures in document.pop("recomputation", {}).items()
    }
    split = document.pop("split", None)
    if split is not None:
        split["kept"] = tuple((name, reason) for name, reason in split.get("kept", ()))
    output = tuple(BoundaryTensor(**tensor) for tensor in document.pop("output", ()))
    saves = tuple(document.pop("saves", ()))
    reads = document.pop("reads", None)
    writes, unreached = tuple(document.pop("writes", ())), tuple(document.pop("unreached", ()))
    parts = (tuple(part.values()) for part in document.pop("shared_gradients", ()))
    fills = tuple(FillProfile(**fill) for fill in document.pop("fills", ()))
    shapes = tuple(map(tuple, document.pop("trained_shapes", ())))
    exchanges: dict[str, Any] = {
        name: tuple(Exchange(**each) for each in document.pop(name, ()))
        for name in ("forward_exchanges", "backward_exchanges")
    }
    of_gradients = document.pop("gradient_peaks", None)
    for plans_own in ("moves", "moved_bytes", "fetched_bytes"):  # a measured profile says nothing by them
        document.pop(plans_own, None)
    return LayerProfile(
        **document,
        **exchanges,
        recomputation=made_again,
        split=SplitBackward(**split) if split is not None else None,
        output=output,
        saves=saves,
        writes=writes,
        reads=None if reads is None else tuple(reads),
        shared_gradients=tuple(SharedGradient(tuple(storages), num_bytes) for storages, num_bytes in parts),
        fills=fills,
        trained_shapes=shapes,
        unreached=unreached,
        gradient_peaks=None if of_gradients is None else GradientPeaks(**of_gradients),
    )
