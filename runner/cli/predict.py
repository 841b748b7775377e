"""``runner predict``: writes a model's outputs for all samples of a set into one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.arguments import Arguments
from runner.cli.evaluate import asked_for, print_outcome
from runner.errors import Problem, raise_problems

if TYPE_CHECKING:
    from runner.launch.evaluate import Evaluation

__all__ = ["run"]

_FORMATS = (".safetensors", ".npy")


def run(arguments: Arguments) -> int:
    """Predict and write.

    Returns:
        0, or the status with which a rank failed.

    Raises:
        RequestError: there are no weights, the file cannot be placed there, or the request has problems.
    """
    usage = "runner predict outputs/NAME/TIME predictions.safetensors"
    asked = asked_for(arguments, num_files=1, most_sets=1, usage=usage)
    (file,) = asked.files
    raise_problems(_file_problems(file))
    from runner.launch.evaluate import predict

    found = predict(asked.run_dir, asked.overrides, asked.weights, file, sets=asked.sets)
    return print_outcome(found, as_json=arguments.switch("json"), told=_told)


def _file_problems(file: Path) -> list[Problem]:
    if file.suffix not in _FORMATS:
        fix = f"{file.stem or 'predictions'}.safetensors"
        return [Problem("FILE", file, f"must end in {' or '.join(_FORMATS)}", "The ending says the format", fix)]
    if file.is_dir() or not file.absolute().parent.is_dir():
        return [Problem("FILE", file, "must be a file in a folder that exists", fix=file.name)]
    return []


def _told(found: Evaluation) -> str:
    return f"{found.file}: the outputs of {found.weights.path} ({found.weights.which})"
