"""Notes about samples of different sizes, and about models whose shapes between layers depend on values."""

from __future__ import annotations

from runner.profile import ModelProfile

__all__ = ["varying_size_notes"]


def varying_size_notes(profile: ModelProfile) -> tuple[str, ...]:
    """Lines if other samples are of other sizes, or gave other shapes, than those that were profiled."""
    notes = []
    if profile.largest_of_samples:
        notes.append(
            f"samples have different sizes: bytes and seconds are those of micro-batches of the largest of "
            f"{profile.largest_of_samples} samples; longer ones take more"
        )
    if profile.sizes_were_seen_to_vary:
        notes.append(
            "other samples give other shapes between layers: bytes and seconds are an estimate, those of the largest "
            "micro-batch among the first samples"
        )
    return tuple(notes)
