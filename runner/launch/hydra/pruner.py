"""The words that choose a study's pruner, ``hydra.sweeper.pruner=NAME`` and ``hydra.sweeper.pruner.KEY=VALUE``.

Hydra's plugin for Optuna has no such key. The pruner itself works in each trial's job, see
:mod:`runner.launch.hydra.pruning`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.config.schema import RunConfig
from runner.errors import Problem, did_you_mean

__all__ = ["PRUNED_FILE", "PRUNERS", "Pruner", "split_pruner"]

PRUNED_FILE = "pruned"
"""Stands in the directory of a job that its pruner has ended."""
PRUNERS = {"median": "MedianPruner", "percentile": "PercentilePruner"}
"""Those that decide by complete trials alone, which a job finds beside itself, with Optuna's name."""
_KEY = "hydra.sweeper.pruner"


@dataclass(frozen=True, slots=True)
class Pruner:
    """What a request asks for.

    Args:
        name: one of :data:`PRUNERS`, or None.
        options: arguments of Optuna's class.
    """

    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def words(self, direction: str) -> list[str]:
        """The overrides with which a trial's job has its pruner."""
        if self.name is None:
            return []
        options = ",".join(f"{key}:{json.dumps(value)}" for key, value in self.options.items())
        kwargs = f"{{name:{self.name},options:{{{options}}},direction:{direction}}}"
        return ["callbacks.pruning.target=runner.launch.hydra.pruning:Pruning", f"callbacks.pruning.kwargs={kwargs}"]

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        """What speaks against pruning the trials of a request."""
        if self.name is None:
            if self.options:
                yield Problem(_KEY, None, "must name a pruner", f"It may be {', '.join(PRUNERS)}", f"{_KEY}=median")
            return
        if self.name not in PRUNERS:
            near = did_you_mean(self.name, PRUNERS) or "median"
            yield Problem(_KEY, self.name, f"must be one of {', '.join(PRUNERS)}", fix=f"{_KEY}={near}")
            return
        if config.trainer.val_every is None:
            why = "It looks at validations, and there is one, at the end only"
            yield Problem(_KEY, self.name, "needs trainer.val_every", why, "trainer.val_every=100")
        yield from self._of_optuna()

    def _of_optuna(self) -> Iterator[Problem]:
        import optuna

        try:
            getattr(optuna.pruners, PRUNERS[str(self.name)])(**self.options)
        except (TypeError, ValueError) as error:
            yield Problem(
                _KEY, dict(self.options), f"must be arguments of optuna.pruners.{PRUNERS[str(self.name)]}", str(error)
            )


def split_pruner(words: Sequence[str]) -> tuple[Pruner, list[str]]:
    """Return the pruner that the words about Hydra's plugins ask for, and the other words."""
    own = [word.partition("=") for word in words if word.startswith((f"{_KEY}=", f"{_KEY}."))]
    name = next((value for key, _, value in own if key == _KEY), None)
    options = {key.removeprefix(f"{_KEY}."): _read(value) for key, _, value in own if key != _KEY}
    return Pruner(name, options), [word for word in words if not word.startswith((f"{_KEY}=", f"{_KEY}."))]


def _read(value: str) -> Any:
    """A number, or the text itself."""
    try:
        return json.loads(value)
    except ValueError:
        return value
