"""Jobs of a sweep that leave their layout to the runner: each finds its own before it starts.

The record of such a job has what was asked for, and then the request that was found, with which the job goes on when
the sweep is started again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.free_keys import freed_keys
from runner.config.schema import RunConfig
from runner.launch.run.find_layout import asks_for_layout, checked_search
from runner.plan.requested_schedule import resolve_request
from runner.record import ASKED_WORDS, FOUND_WORDS, RunRecord

__all__ = ["asked", "found_before", "held", "is_open", "search_problems", "with_layout"]

_OF_SWEEP = ("run_dir", "sweep_retry", "sweep_on_failure", "sweep_most", "sweep_report", "sweep_without")
_SECTIONS = {key.partition(".")[0] for key in freed_keys(None)}


def is_open(config: RunConfig) -> bool:
    """Whether the layout of a request is left to the runner."""
    return config.parallelism.name == "auto"


def held(words: Iterable[str]) -> list[str]:
    """The keys that a search leaves as they are because they are named, whatever their values are."""
    keys = {word.partition("=")[0].lstrip("+~") for word in words}
    return sorted(key for key in keys if key.partition(".")[0] in _SECTIONS)


def search_problems(words: Sequence[str]) -> None:
    """Check a job whose layout is left to the runner by all rules that need no model.

    Raises:
        RequestError: it has problems.
    """
    if asks_for_layout(words):
        checked_search(words)


def asked(config: RunConfig, words: Sequence[str]) -> dict[str, Any]:
    """What the record of a job has that is to find its layout; nothing for others."""
    return {ASKED_WORDS: _own(words)} if is_open(config) else {}


def found_before(config: RunConfig, words: Sequence[str], record: RunRecord) -> RunConfig:
    """The request of a job with the layout that an earlier start of the sweep found; as it is where none has.

    Args:
        config, words: the request of this start, which may differ from the earlier one in what changes no result.
        record: what the earlier start has left.
    """
    if not is_open(config) or FOUND_WORDS not in record.extras:
        return config
    new = [word for word in _own(words) if word not in record.extras[ASKED_WORDS]]
    return _resolved([*record.extras[FOUND_WORDS], *new], config)


def with_layout(config: RunConfig, job_dir: Path) -> RunConfig:
    """The request of a job with a layout, which is searched if it has none, and is then kept in its record.

    Raises:
        RequestError: no layout can be planned.
        DoesNotFitError: nothing fits.
    """
    if not is_open(config):
        return config
    from runner.launch.run.take_layout import words_with_layout

    words = words_with_layout(RunRecord.load(job_dir).extras[ASKED_WORDS])
    record = RunRecord.load(job_dir)
    record.replace(extras=record.extras | {FOUND_WORDS: list(words)}).save(job_dir)
    return _resolved(words, config)


def _own(words: Sequence[str]) -> list[str]:
    """The words that would make the job a run of its own, as a user would type them."""
    return [word for word in words if word.partition("=")[0].lstrip("+~") not in _OF_SWEEP]


def _resolved(words: Sequence[str], config: RunConfig) -> RunConfig:
    return replace(resolve_request(words), **{key: getattr(config, key) for key in _OF_SWEEP})
