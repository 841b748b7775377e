"""Finds and checks the checkpoint from which a run continues, once, before any rank exists."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.schema import RunConfig
from runner.environment import arithmetic
from runner.errors import Problem, raise_problems, typed_word
from runner.launch.run.directory import last_run
from runner.launch.run.going_on import command_that_continues
from runner.record import RECORD_FILE, RunRecord, StepLog, read_steps

if TYPE_CHECKING:
    from torch import Tensor

    from runner.checkpoint.parts import DividedTensor
    from runner.training.resume import History, Progress

__all__ = ["AUTO", "CHECKPOINTS", "absent_checkpoint", "continue_record", "with_checkpoint"]

logger = logging.getLogger(__name__)

AUTO = "auto"
CHECKPOINTS = "checkpoints"

_SAME_STATES = {"adamw", "auto"}  # a LightningModule's own optimizer must not be combined with adamw
# Keys that must not change at a resume: they decide the samples of the next step or the meaning of optimizer states.
_FIXED = ("seed", "data.batch_size", "data.shuffle", "data.drop_last", "optimizer.name", "precision.name")
# Keys whose changes are not logged: where a run writes, and how it was started.
_NOT_TOLD = ("name", "run_dir", "resume", "command")
_ABSENT = "not set"  # an argument of a user's function that only one of two requests has


def absent_checkpoint(config: RunConfig) -> list[Problem]:
    """The refusal of a checkpoint that is not there, which is told before any checkpoint is read."""
    if config.resume is None or config.resume == AUTO or Path(config.resume).exists():
        return []
    from runner.checkpoint.file import checkpoint_files, damage_of

    path = Path(config.resume)
    newest = _newest_of([*checkpoint_files(path.parent).values()])
    return [_refused(config, path, "must be auto or a good checkpoint's file", str(damage_of(path)), newest)]


def with_checkpoint(config: RunConfig) -> RunConfig:
    """Return ``config`` with ``resume`` as the checkpoint's absolute path, or None if the run starts from the
    beginning.

    ``auto`` takes the newest valid checkpoint of ``run_dir`` and skips files that are damaged or incomplete.

    Raises:
        RequestError: the checkpoint is damaged, or belongs to another model or to another order of samples.
        RunFailedError: a checkpoint cannot be read now, so that nobody knows whether it is the one.
    """
    if config.resume is None:
        return config
    from runner.checkpoint.file import CheckpointError, PickledError, admitted
    from runner.training.resume import read_progress

    path: Path | None = None
    try:
        with admitted(config.checkpoint.allow_pickle):
            path = _newest(config) if config.resume == AUTO else _given(Path(config.resume), config)
            if path is None:
                return replace(config, resume=None)
            progress, weights = read_progress(path)
    except PickledError as error:
        named = ",".join([*config.checkpoint.allow_pickle, *error.names])
        why = f"{error}; name what you trust" if error.names else str(error)
        fix = f"'checkpoint.allow_pickle=[{named}]'" if error.names else ""
        raise_problems([Problem("resume", error.path, "must hold tensors and plain values", why, fix)])
        raise
    except CheckpointError as error:
        raise_problems([Problem("resume", path, "must be a good checkpoint", str(error))])
        raise
    problems = [*_fixed_problems(config, progress), *_model_problems(config, progress, weights, path)]
    raise_problems(problems and (_other_words(config, progress) or problems))
    if config.resume != AUTO:  # which goes on with the data that it had
        raise_problems(_data_problems(config, progress))
    logger.info("continuing after step %d of %s", progress.step, path)
    for place, why in progress.missing.items():
        logger.warning("the checkpoint is without %s, which begins anew: %s", place, why)
    for line in _changes(config, progress.config):
        logger.info("changed since then: %s", line)
    if moved := list(_differences(arithmetic(), progress.arithmetic)):
        logger.warning("saved on another machine: %s. The bits may differ from an unbroken run's", "; ".join(moved))
    return replace(config, resume=str(path))


def continue_record(record: RunRecord, config: RunConfig, run_dir: Path) -> RunRecord:
    """Cut ``record`` and ``steps.jsonl`` back to the checkpoint's step, or to the beginning.

    Args:
        record: the present record of the directory.
        config: the request; its ``resume`` is None or the path of a checkpoint.
    """
    from runner.checkpoint.file import admitted
    from runner.training.resume import History, read_progress

    if config.resume is None and not record.steps and not read_steps(run_dir):
        return record
    history = History()
    if config.resume is not None:
        with admitted(config.checkpoint.allow_pickle):
            history = read_progress(Path(config.resume))[0].history
    with StepLog(run_dir, _steps_as_saved(run_dir, history)) as log:
        for step in range(len(read_steps(run_dir)), len(history.loss)):
            log.write(step=step + 1, loss=history.loss[step], seconds=history.seconds[step])
    return record.continued(history.loss, history.seconds, history.val_loss, history.metrics)


def _steps_as_saved(run_dir: Path, history: History) -> int:
    """How many lines of ``steps.jsonl`` say what the checkpoint says, whose sums have been checked.

    The lines have no sum, and a changed digit is a number, too. Numbers are compared as text, because NaN is no number.
    """
    lines = [(repr(line["loss"]), repr(line["seconds"])) for line in read_steps(run_dir)]
    saved = [(repr(loss), repr(seconds)) for loss, seconds in zip(history.loss, history.seconds, strict=False)]
    same = [line == other for line, other in zip(lines, saved, strict=False)]
    return same.index(False) if False in same else len(same)


def _newest(config: RunConfig) -> Path | None:
    if config.run_dir is None:
        last = last_run(config.name)
        continues = f"; {typed_word('run_dir', last)} continues the last run of this name" if last is not None else ""
        logger.warning("resume=auto without run_dir: the run starts anew, in a new directory%s", continues)
        return None
    directory = Path(config.run_dir, CHECKPOINTS)
    if not directory.is_dir():
        return None
    from runner.checkpoint.file import newest_good_checkpoint

    path, passed = newest_good_checkpoint(directory)
    for line in passed:
        logger.warning("%s", line)
    return path.absolute() if path is not None else None


def _given(path: Path, config: RunConfig) -> Path:
    from runner.checkpoint.file import checkpoint_files, damage_of
    from runner.checkpoint.parts import has_parts

    if path.is_dir() and not has_parts(path):
        newest = _newest_of([*checkpoint_files(path).values(), *checkpoint_files(path / CHECKPOINTS).values()])
        why = "This is a directory" if newest else "This is a directory without a good checkpoint of a run"
        raise_problems([_refused(config, path, "must be auto or a checkpoint's file", why, newest)])
    damage = damage_of(path)
    if damage is not None:
        newest = _newest_of([other for other in checkpoint_files(path.parent).values() if other != path])
        raise_problems([_refused(config, path, "must be auto or a good checkpoint's file", damage, newest)])
    return path.absolute()


def _refused(config: RunConfig, path: Path, rule: str, why: str, instead: Path | None) -> Problem:
    """The refusal of ``path``, which advises the checkpoint ``instead`` where that is of this model."""
    if instead is None:
        return Problem("resume", path, rule, why)
    from runner.training.resume import read_progress

    misfits = _model_problems(config, *read_progress(instead), instead)
    if misfits:
        return Problem("resume", path, rule, f"{why}; {instead} is of another model: {misfits[0].why}")
    return Problem("resume", path, rule, why, typed_word("resume", instead))


def _newest_of(paths: Sequence[Path]) -> Path | None:
    """The last good one of some checkpoints, or None."""
    from runner.checkpoint.file import CheckpointError, damage_of
    from runner.training.resume import read_progress

    for path in reversed(paths):
        with suppress(CheckpointError):  # one that calls what is not admitted, or is no run's
            if damage_of(path) is None:
                read_progress(path)
                return path
    return None


def _fixed_problems(config: RunConfig, progress: Progress) -> Iterator[Problem]:
    from runner.config.compose.resolve import to_container

    asked, saved = _flat(to_container(config)), _flat(progress.config)
    for path in _FIXED:
        if path in saved and asked[path] != saved[path] and {asked[path], saved[path]} != _SAME_STATES:
            why = "Another value would take other samples or misread the optimizer's state"
            fix = f"{path.removesuffix('.name')}={_shown(saved[path])}"
            yield Problem(path, asked[path], f"must be {_shown(saved[path])}, as in the checkpoint", why, fix)
    if config.trainer.max_epochs is None and config.trainer.max_steps < progress.step:
        why = f"The checkpoint is of step {progress.step}, and trainer.max_steps is the total"
        fix = f"trainer.max_steps={progress.step + config.trainer.max_steps}"
        yield Problem("trainer.max_steps", config.trainer.max_steps, f"must be at least {progress.step}", why, fix)


def _other_words(config: RunConfig, progress: Progress) -> list[Problem]:
    """That ``resume=auto`` came without the words of the run, whose model is another one: it takes no words from it."""
    saved, asked = progress.config.get("model", {}).get("target"), config.model.target
    if config.resume != AUTO or config.run_dir is None or saved in (None, asked):
        return []
    directory = Path(config.run_dir)
    command = RunRecord.load(directory).command if (directory / RECORD_FILE).is_file() else None
    why = f"The run's model is {saved}, and this request's is {asked}"
    fix = command_that_continues(command, directory) if command else ""
    return [Problem("resume", AUTO, "must come with the words of the run that it continues", why, fix)]


def _data_problems(config: RunConfig, progress: Progress) -> Iterator[Problem]:
    """What a rank would say of data of another length, as far as the data is there."""
    from runner.model.data import is_promised, load_datasets
    from runner.model.epochs import num_steps
    from runner.training.resume import other_data_problems

    if is_promised(config.data):
        return
    datasets = load_datasets(config.data, config.seed)
    samples = None if datasets.streams else len(datasets.train)
    steps = None if samples is None else num_steps(samples, config.data)
    yield from other_data_problems(config, progress, steps, samples)


def _model_problems(
    config: RunConfig, progress: Progress, weights: Mapping[str, Tensor | DividedTensor], path: Path
) -> list[Problem]:
    from runner.checkpoint.state import tensor_problems
    from runner.model.load import tensor_shapes

    shapes = tensor_shapes(config)
    if shapes is None:  # the shapes are unknown here; the ranks build the model and compare
        return []
    return [replace(problem, value=path) for problem in tensor_problems(shapes, weights, progress.grown)]


def _changes(config: RunConfig, saved: Mapping[str, Any]) -> Iterator[str]:
    from runner.config.compose.resolve import to_container

    usual = _flat(to_container(RunConfig()))  # a key that an earlier version did not have
    asked, before = usual | _flat(to_container(config)), usual | _flat(saved)
    if config.trainer.max_epochs is not None and asked["trainer.max_epochs"] == before["trainer.max_epochs"]:
        asked["trainer.max_steps"] = before["trainer.max_steps"]  # the ranks count them
    absent = dict.fromkeys([path for path in {**asked, **before} if path not in _NOT_TOLD], _ABSENT)
    return _differences({path: asked.get(path, _ABSENT) for path in absent}, absent | before)


def _differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    """A line for each value that is another one than before; values that were not noted before are left out."""
    for path, value in now.items():
        if path in before and value != before[path]:
            yield f"{path} = {_shown(value)}, was {_shown(before[path])}"


def _flat(container: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in container.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        found.update(inner)
    return found


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
