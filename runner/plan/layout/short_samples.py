"""A note about samples that are shorter than the model's length, for which a plan predicts less than is meant."""

from __future__ import annotations

import re
from typing import Any

from runner.config.schema import RunConfig
from runner.profile import ModelProfile

__all__ = ["short_sample_notes"]

# Names under which models take the largest number of tokens of a sample.
_LENGTH = re.compile(r"(^|_)(length|len|context|positions|position_embeddings|block_size|seq|tokens)(_|$)")


def short_sample_notes(config: RunConfig, profile: ModelProfile) -> tuple[str, ...]:
    """One line for each of the model's lengths that the samples do not reach; none if they are not tokens."""
    tokens = profile.tokens_per_sample
    if tokens is None:
        return ()
    return tuple(
        f"samples have {tokens} tokens, model.kwargs.{name} is {value}: memory and time are those of {tokens} tokens"
        f"{_remedy(config, name, value)}"
        for name, value in config.model.kwargs.items()
        if _is_length(name, value) and value > tokens
    )


def _is_length(name: str, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and _LENGTH.search(name) is not None


def _remedy(config: RunConfig, name: str, value: int) -> str:
    """The override that makes the samples longer, if the data have a key of the same name."""
    return f". Try data.kwargs.{name}={value}" if name in config.data.kwargs else ""
