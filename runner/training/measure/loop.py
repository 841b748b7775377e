"""What a step takes beside its batch and the engine's work: Lightning's loop, with its loggers and callbacks.

No rehearsal plays it, and it hardly depends on a model's size. So it is remembered for each machine.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from runner.config.links import cache_root
from runner.config.schema import RunConfig
from runner.files import write_atomically

__all__ = ["remember_loop", "usual_loop_seconds"]

_BEFORE_ANY_RUN = 3e-3
"""Seconds of a machine that has not trained yet; a CPU of two cores took 2 to 4.5 ms."""
_RUNS, _FEWEST_STEPS = 5, 5
_DIGITS = 16


def usual_loop_seconds(config: RunConfig) -> float:
    """The seconds expected of a step's loop, by the last runs here of this model with these loggers and callbacks."""
    runs = _known().get(_key(config), ())
    return median(runs) if runs else _BEFORE_ANY_RUN


def remember_loop(config: RunConfig, steps: Sequence[float]) -> None:
    """Remember the seconds that the loop took in each timed step of a run. Errors of the cache are ignored.

    A step whose loop saved, validated or showed something takes longer than others, which the median of several steps
    leaves out.
    """
    if len(steps) < _FEWEST_STEPS:
        return
    known, key = _known(), _key(config)
    known[key] = [*known.get(key, ()), median(steps)][-_RUNS:]
    with suppress(OSError):
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(known))


def _known() -> dict[str, list[float]]:
    with suppress(OSError, ValueError, TypeError, AttributeError):
        found = json.loads(_file().read_text(encoding="utf-8"))
        return {str(key): [float(each) for each in runs] for key, runs in found.items()}
    return {}


def _file() -> Path:
    return cache_root() / "loops" / f"{platform.node() or 'machine'}.json"


def _key(config: RunConfig) -> str:
    """What the loop depends on. A module's own hooks are known by its target, and averages of weights by its size."""
    logger, averaged = config.logger, config.trainer.ema_decay is not None
    callbacks = {name: asdict(own) for name, own in config.callbacks.items()}
    parts: list[Any] = [logger.target or logger.name, sorted(logger.others), config.profiler.name, callbacks]
    parts += [config.model.target, config.model.kwargs if averaged else None]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:_DIGITS]
