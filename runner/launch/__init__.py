"""Starting the ranks of a run, and what stays true whichever way they end."""

from __future__ import annotations

__all__: list[str] = []
