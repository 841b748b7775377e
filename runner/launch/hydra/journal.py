"""The journal of a study: what was asked and what was told, one line each, in the sweep's directory.

A study that is started again takes its finished trials from it, whatever sampler it has, and asks first for those that
were not finished. Files of text need no locks, which shared file systems often lack; one process writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

__all__ = ["JOURNAL_FILE", "Journal", "Trialled"]

JOURNAL_FILE = "study.jsonl"


@dataclass(frozen=True, slots=True)
class Trialled:
    """One trial.

    Args:
        parameters: the values that were asked for.
        distributions: where each comes from, in Optuna's JSON.
        attributes: what the sampler keeps with the trial.
        state: ``complete``, ``fail`` or ``pruned``; None while it is not finished.
        value: the value of a complete or a pruned trial.
    """

    number: int
    parameters: Mapping[str, Any]
    distributions: Mapping[str, str]
    attributes: Mapping[str, Any]
    state: str | None = None
    value: float | None = None


class Journal:
    """The journal of the study in a sweep's directory; empty if there is no file."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / JOURNAL_FILE
        self.trials: dict[int, Trialled] = {}
        for line in self._lines():
            self._take(line)

    def enter(self, study: Study, *, again: bool) -> None:
        """Give an empty study the finished trials, and the others to be asked for first.

        Args:
            again: whether trials that failed are asked for again.
        """
        for trial in self.trials.values():
            if trial.state is None or (again and trial.state == "fail"):
                study.enqueue_trial(dict(trial.parameters))
            else:
                study.add_trial(_as_of_optuna(trial))

    def asked(self, trial: Trial, study: Study) -> None:
        """Write down that a trial of a study begins."""
        from optuna.distributions import distribution_to_json

        frozen = study.get_trials(deepcopy=False)[trial.number]
        found = {name: distribution_to_json(one) for name, one in frozen.distributions.items()}
        attributes = {name: value for name, value in frozen.system_attrs.items() if name != "fixed_params"}
        self._write(number=trial.number, parameters=frozen.params, distributions=found, attributes=attributes)

    def told(self, number: int, state: str, value: float | None) -> None:
        """Write down how a trial ended."""
        self._write(number=number, state=state, value=value)

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self._file.exists():
            return
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # the last line of a process that was killed
                continue

    def _take(self, line: Mapping[str, Any]) -> None:
        number = line["number"]
        self.trials[number] = replace(self.trials[number], **line) if "state" in line else Trialled(**line)

    def _write(self, **line: Any) -> None:
        begun = self._file.read_bytes() if self._file.exists() else b""
        with self._file.open("a", encoding="utf-8") as file:
            if begun and not begun.endswith(b"\n"):
                file.write("\n")  # behind a line that was cut
            file.write(json.dumps(line) + "\n")
        self._take(line)


def _as_of_optuna(trial: Trialled) -> Any:
    from optuna.distributions import json_to_distribution
    from optuna.trial import TrialState, create_trial

    return create_trial(
        state=TrialState[str(trial.state).upper()],
        value=trial.value,
        params=dict(trial.parameters),
        distributions={name: json_to_distribution(text) for name, text in trial.distributions.items()},
        system_attrs=dict(trial.attributes),
    )
