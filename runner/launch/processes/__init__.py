"""What a process and its parent agree on: how it is started, watched, stopped and ended, and what it leaves to say."""

from __future__ import annotations

__all__: list[str] = []
