"""Tells for which length of rows a model of a folder is planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.config.schema import RunConfig

__all__ = ["length_notes"]

_USUAL_LENGTH = 2048  # tokens of a row with which language models are commonly tuned


def length_notes(config: RunConfig) -> list[str]:
    """That a model of a folder is planned for short rows of random tokens, where no data is named."""
    folder, key = config.model.pretrained, "sequence_length"
    if folder is None or config.data.name != "random_tokens" or key not in config.data.kwargs:
        return []
    try:
        most = json.loads(Path(folder, "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        most = None
    length = config.data.kwargs[key]
    takes = f" of the {most} that the model takes" if most else ""
    example = min(most or _USUAL_LENGTH, _USUAL_LENGTH)
    longer = f", or data.kwargs.{key}={example}" if length < example else ""
    grows = f"memory and time grow with the length: name your data{longer}"
    return [f"planned for rows of {length} random tokens{takes}; {grows}"]
