"""Notes about layers that ranks divide."""

from __future__ import annotations

from runner.profile import ModelProfile

__all__ = ["draw_problem", "part_notes"]


def part_notes(profile: ModelProfile) -> tuple[str, ...]:
    """A note if ranks draw random numbers of their own within divided layers."""
    why = draw_problem(profile)
    return () if why is None else (f"{why}: losses are those of one process in distribution, not in numbers",)


def draw_problem(profile: ModelProfile) -> str | None:
    """Where each rank draws random numbers for its part of a layer, or None if nowhere."""
    names = [layer.name for layer in profile.layers if layer.draws_apart]
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"each rank draws dropout of its own for its parts of layer {names[0]}{more}"
