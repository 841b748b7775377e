"""Rows of several sequences for the models of ``transformers``, which are told by the positions alone.

Positions begin anew at each sequence. From that ``transformers`` makes the block-diagonal mask, so that no token sees
another sequence. Some architectures take positions and yet let all tokens of a row meet; these are refused, by looking
whether the mask was made from the positions. In a pipeline it is made on the first stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

__all__ = ["one_sequence_a_row", "telling_apart"]

_TELL_APART: set[type] = set()
"""The classes that were seen to make their mask from the positions."""

_USUAL: ContextVar[bool] = ContextVar("_USUAL", default=False)
"""Whether ``transformers`` makes the masks of a usual call in training."""

_FIX = "data.kwargs.layout=padded has one sequence to a row"


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Around a model's call without positions: ``transformers`` makes the masks that a usual call in training has.

    It looks for several sequences in a row at the values of positions that it makes itself. Fake tensors have none, so
    that it would assume several, and make a mask that no real run makes. A trace, too, would get a mask where the
    attention's own causal order is enough, because ``transformers`` thinks of graphs for any length.
    """
    _make_usual_masks_where_asked()
    before = _USUAL.set(True)
    try:
        yield
    finally:
        _USUAL.reset(before)


def _make_usual_masks_where_asked() -> None:
    """Put functions that obey ``_USUAL`` in place of those that look at positions, and at whether a trace is made."""
    from transformers import masking_utils

    for name, usual in (("find_packed_sequence_indices", None), ("is_torchdynamo_exporting", False)):
        own: Any = getattr(masking_utils, name)
        if not hasattr(own, "asked_by_runner"):
            obeys: Any = partial(_own_or_usual, own, usual)
            obeys.asked_by_runner = True
            setattr(masking_utils, name, obeys)


def _own_or_usual(own: Callable[..., Any], usual: Any, *args: Any, **kwargs: Any) -> Any:
    return usual if _USUAL.get() else own(*args, **kwargs)


@contextmanager
def telling_apart(model: Any) -> Iterator[None]:
    """Refuse a model that mixes the sequences of a row, around its call with ``position_ids`` int64 [batch, seq].

    Args:
        model: the class of ``transformers``.

    Raises:
        ValueError: it would mix them.
    """
    if model in _TELL_APART:
        yield
        return
    _require_positions(model)
    with _watched(model):
        yield
    _TELL_APART.add(model)


def _require_positions(model: Any) -> None:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{model.__name__} takes no position_ids, by which it would tell sequences apart: {_FIX}")
    if model._is_stateful:
        raise ValueError(f"{model.__name__} carries a state from token to token, across sequences: {_FIX}")


@contextmanager
def _watched(model: Any) -> Iterator[None]:
    """Refuse the model unless a mask is made from the positions meanwhile."""
    from transformers import masking_utils

    own: Any = masking_utils.find_packed_sequence_indices
    calls: list[None] = []

    def find(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return own(*args, **kwargs)

    masking_utils.find_packed_sequence_indices = find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = own
    if not calls:
        raise ValueError(f"{model.__name__} takes position_ids, and lets a row's sequences see each other: {_FIX}")
