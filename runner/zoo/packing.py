"""Rows of several sequences for the models of ``transformers``, which are told by the positions alone.

Positions begin anew at each sequence. From that ``transformers`` makes the block-diagonal mask, so that no token sees
another sequence. Some architectures take positions and yet let all tokens of a row meet; these are refused, by looking
whether the mask was made from the positions. In a pipeline it is made on the first stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["telling_apart"]

_TELL_APART: set[type] = set()
"""The classes that were seen to make their mask from the positions."""

_FIX = "data.kwargs.layout=padded has one sequence to a row"


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
