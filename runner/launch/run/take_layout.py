"""Takes the layout that ``parallelism=auto`` finds, and tells it, or says why nothing fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from runner.errors import DoesNotFitError
from runner.launch.run.find_layout import FoundLayout, find_layout, remedies
from runner.plan.planners.told import chosen_lines, misfit_line

__all__ = ["misfit", "words_with_layout"]

logger = logging.getLogger(__name__)


def words_with_layout(words: Sequence[str], progress: Callable[[str], None] = lambda line: None) -> tuple[str, ...]:
    """The words of a request with the layout that was found, which is told.

    Args:
        words: the request, with ``parallelism=auto``.
        progress: is told what is done.

    Raises:
        RequestError: the request has problems, or no layout can be planned.
        DoesNotFitError: nothing fits.
    """
    found = find_layout(words, progress)
    if not found.chosen.fits:
        raise DoesNotFitError(misfit(found))
    for line in chosen_lines(found.chosen, found.problem, found.words):
        logger.info("%s", line)
    return found.words


def misfit(found: FoundLayout) -> str:
    """Why nothing fits, and what would help; empty if something does."""
    if found.chosen.fits:
        return ""
    tried = remedies(found) if found.chosen.best.answer.planner == "joint" else []
    return misfit_line(found.chosen, found.problem, tried)
