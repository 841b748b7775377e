"""Generators: one file per family. They emit compute only; passes add the rest."""

from __future__ import annotations

__all__: list[str] = []
