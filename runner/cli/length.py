"""Tells for which length of rows a model of a folder is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.compose.layers import USUAL_LENGTH, longest_of_folder

if TYPE_CHECKING:
    from runner.config.schema import RunConfig

__all__ = ["length_notes"]


def length_notes(config: RunConfig) -> list[str]:
    """For how long rows of random tokens a model of a folder is planned, where no data is named."""
    folder, key = config.model.pretrained, "sequence_length"
    if folder is None or config.data.name != "random_tokens" or key not in config.data.kwargs:
        return []
    most, length = longest_of_folder(folder, config.model.config_file or "config.json"), config.data.kwargs[key]
    takes = f" of the {most} that the model takes" if most else ""
    longest = min(most or USUAL_LENGTH, USUAL_LENGTH)
    told = f"planned for rows of {length} random tokens{takes}; memory and time grow with the length: name your data"
    return [told + (f", or data.kwargs.{key}={longest}" if length < longest else "")]
