"""What an evaluation's ranks read besides the configuration, as a file in their directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.files import write_atomically

__all__ = ["RESULT_FILE", "SETS", "EvaluationRequest"]

RESULT_FILE = "result.json"
"""The file in which rank 0 leaves the figures, in the same directory."""

SETS = ("validation", "test", "train")
"""The names of the sets that a data function may return."""

_FILE = "evaluation.json"


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate.

    Args:
        weights: a checkpoint of a run, or a safetensors file with global names.
        sets: names of :data:`SETS`; none: the validation set and, if there is one, the test set.
        predictions: the file for the outputs, ``.safetensors`` or ``.npy``; None: the loss and metrics are measured.
    """

    weights: str
    sets: tuple[str, ...] = ()
    predictions: str | None = None

    def save(self, directory: Path) -> None:
        """Write the file."""
        write_atomically(directory / _FILE, json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, directory: Path) -> EvaluationRequest:
        """Read what :meth:`save` wrote."""
        content = json.loads((directory / _FILE).read_text(encoding="utf-8"))
        return cls(content["weights"], tuple(content["sets"]), content["predictions"])
