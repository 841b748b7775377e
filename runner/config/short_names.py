"""Short names of jobs, for tables: their overrides by the last part of each key."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["short_names"]


def short_names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The overrides of each job by the last part of their keys, e.g. ``pipeline=2``; in full where several end alike.

    Args:
        jobs: for each job its overrides; words that set nothing stay as they are.
    """
    keys = {word.partition("=")[0] for job in jobs for word in job if "=" in word}
    ends = [key.rpartition(".")[2] for key in keys]

    def short(word: str) -> str:
        key, equals, value = word.partition("=")
        end = key.rpartition(".")[2]
        return f"{end}={value}" if equals and ends.count(end) == 1 else word

    return [" ".join(map(short, job)) for job in jobs]
