"""Tells for which length of rows a model of a folder is planned, and which length is too much for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.compose.layers import USUAL_LENGTH, longest_of_folder

if TYPE_CHECKING:
    from runner.config.schema import RunConfig

__all__ = ["length_notes"]


def length_notes(config: RunConfig) -> list[str]:
    """For how long rows a model of a folder is planned where no data is named, or that rows of text are too long."""
    folder, key = config.model.pretrained, {"random_tokens": "sequence_length", "text": "length"}.get(config.data.name)
    if folder is None or key not in config.data.kwargs:
        return []
    most, length = longest_of_folder(folder, config.model.config_file or "config.json"), config.data.kwargs[key]
    if config.data.name == "text":
        told = f"rows of {length} tokens are longer than the {most} positions that the model was made for"
        return [f"{told}: data.kwargs.{key}={most}"] if most and isinstance(length, int) and length > most else []
    takes = f" of the {most} that the model takes" if most else ""
    longest = min(most or USUAL_LENGTH, USUAL_LENGTH)
    told = f"planned for rows of {length} random tokens{takes}; memory and time grow with the length: name your data"
    return [told + (f", or data.kwargs.{key}={longest}" if length < longest else "")]
