"""No compression: gradients are sent as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.schema import CompressionConfig
from runner.optim.catalogue.compression import CompressionKind

if TYPE_CHECKING:
    from runner.engine.update.gradients import StageGradients
    from runner.engine.update.reducer import Reducer

__all__ = ["NONE"]


def _make(section: CompressionConfig, gradients: StageGradients) -> Reducer:
    from runner.engine.update.reducer import PlainSum

    return PlainSum()


NONE = CompressionKind(name="none", description="gradients travel as they are", make=_make)
