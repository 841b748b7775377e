"""Generators of schedules, one file per family. They make only compute actions; later passes add the rest."""

from __future__ import annotations

__all__: list[str] = []
