"""A note about models in which the shapes of what passes between layers depend on values."""

from __future__ import annotations

from runner.profile import ModelProfile

__all__ = ["varying_size_notes"]


def varying_size_notes(profile: ModelProfile) -> tuple[str, ...]:
    """One line if other samples gave other shapes than those that were profiled."""
    if not profile.sizes_were_seen_to_vary:
        return ()
    return (
        "other samples give other shapes between layers: bytes and seconds are an estimate, those of the largest "
        "micro-batch among the first samples",
    )
