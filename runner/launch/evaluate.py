"""Evaluates a run's weights in any layout: finds the weights, makes the request, starts the ranks and reads what they
leave."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.compose.amend import amended
from runner.config.rules.sections import rules
from runner.config.schema import RunConfig
from runner.errors import EXIT_OK, Problem, RequestError, RunnerError, raise_problems
from runner.launch.local.ranks import Launch, Outcome, run_ranks
from runner.launch.needs.packages import missing_packages
from runner.launch.run.prepare import place_of, write_request
from runner.plan.requested_schedule import schedule_problems
from runner.record import RunRecord, write_atomically
from runner.training.evaluation_request import RESULT_FILE, SETS, EvaluationRequest

__all__ = ["BEST", "LAST", "Evaluation", "Found", "evaluate", "evaluation_config", "find_weights", "predict"]

logger = logging.getLogger(__name__)

BEST, LAST = "best", "last"
EVALUATION_FILE = "evaluation.json"

_ENTRY = "runner.training.evaluate:run_evaluation"
_CHECKPOINTS = "checkpoints"
_WEIGHTS = "weights.safetensors"
_KEPT = (
    "seed",
    "device",
    "compile",
    "model",
    "adapter",
    "embedding",
    "data",
    "loss",
    "metrics",
    "parallelism",
    "precision",
    "hardware",
)
_UNLIMITED = "1e18"  # bytes: a plan counts gradients and optimizer states, which an evaluation does not have


@dataclass(frozen=True)
class Found:
    """The weights to evaluate.

    Args:
        path: a checkpoint, or a safetensors file.
        which: what they are, in words.
    """

    path: Path
    which: str


@dataclass(frozen=True)
class Evaluation:
    """What was found.

    Args:
        weights: what was evaluated.
        layout: degrees, and ``world_size``.
        figures: ``val_loss``, ``val_NAME``, ``test_loss``, ``test_NAME``; empty for predictions.
        file: where the figures or predictions are.
    """

    weights: Found
    layout: dict[str, int]
    figures: dict[str, float]
    file: Path

    def to_json(self) -> dict[str, Any]:
        """The document of ``runner evaluate --json``."""
        weights = {"weights": str(self.weights.path), "which": self.weights.which}
        return weights | {"layout": self.layout, **self.figures, "file": str(self.file)}


def evaluate(
    run_dir: Path, overrides: Sequence[str], weights: Found, *, sets: Sequence[str] = (), file: Path | None = None
) -> Evaluation | Outcome:
    """Measure the loss and metrics of a run's weights.

    Args:
        run_dir: the run's directory.
        overrides: another layout, other data or further metrics.
        weights: see :func:`find_weights`.
        sets: names of sets; none: the validation set and, if there is one, the test set.
        file: the JSON file that is written; None: ``evaluation.json`` in the run's directory.

    Returns:
        the figures, or the outcome of ranks that failed.

    Raises:
        RequestError: the request has problems.
    """
    file = file if file is not None else run_dir / EVALUATION_FILE
    asked = EvaluationRequest(str(weights.path.absolute()), tuple(sets))
    made = _run(evaluation_config(run_dir, overrides), asked)
    if isinstance(made, Outcome):
        return made
    found = Evaluation(weights, *made, file)
    write_atomically(file, json.dumps(found.to_json(), indent=1) + "\n")
    return found


def predict(
    run_dir: Path, overrides: Sequence[str], weights: Found, file: Path, *, sets: Sequence[str] = ()
) -> Evaluation | Outcome:
    """Write the last layer's outputs for all samples of a set; otherwise as :func:`evaluate`.

    Args:
        file: ``.safetensors``, with a tensor ``predictions`` (or ``predictions.0``, …), or ``.npy``.
        sets: the name of one set; none: the test set or, without one, the validation set.
    """
    asked = EvaluationRequest(str(weights.path.absolute()), tuple(sets), str(file.absolute()))
    made = _run(evaluation_config(run_dir, overrides), asked)
    return made if isinstance(made, Outcome) else Evaluation(weights, *made, file)


def find_weights(run_dir: Path, which: str | None = None, file: Path | None = None) -> Found:
    """The weights of a run.

    Args:
        run_dir: the run's directory.
        which: :data:`BEST` or :data:`LAST`; None: the best checkpoint if the run kept one, else the newest.
        file: a checkpoint or a safetensors file instead.

    Raises:
        RequestError: there are none.
    """
    record = _record(run_dir)
    if file is not None:
        if not file.exists():
            raise RequestError([Problem("--weights", file, "must be a file", "There is no such file")])
        return Found(file, "as named")
    kept = record.artifacts.get("best_checkpoint")
    best = run_dir / kept if kept is not None else None
    if which != LAST and best is not None and best.exists():
        return Found(best, "the best checkpoint")
    if which == BEST:
        why = "The run kept none: checkpoint=best keeps the one with the lowest validation loss"
        raise RequestError([Problem("--best", run_dir, "needs a best checkpoint", why, "--last")])
    from runner.checkpoint.file import admitted, newest_good_checkpoint

    with admitted(record.config.get("checkpoint", {}).get("allow_pickle", [])):
        newest, passed = newest_good_checkpoint(run_dir / _CHECKPOINTS)
    for line in passed:
        logger.warning("%s", line)
    if newest is not None:
        return Found(newest, "the newest checkpoint")
    if (run_dir / _WEIGHTS).is_file():
        return Found(run_dir / _WEIGHTS, "the weights at the end")
    why = f"There is no {_CHECKPOINTS}/step-N.ckpt and no {_WEIGHTS} in it"
    raise RequestError([Problem("RUN_DIR", run_dir, "must hold weights", why)])


def _record(run_dir: Path) -> RunRecord:
    try:
        record = RunRecord.load(run_dir)
    except FileNotFoundError:
        why = "It has no record.json" if run_dir.is_dir() else "There is no such directory"
        raise RequestError([Problem("RUN_DIR", run_dir, "must be a run's directory", why)]) from None
    except ValueError as error:
        raise RequestError([Problem("RUN_DIR", run_dir, "must hold a run's record", str(error))]) from error
    if not record.config:
        raise RequestError([Problem("RUN_DIR", run_dir, "must be of a run that began", record.reason or "")])
    return record


def evaluation_config(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """The request of an evaluation: what of the run decides its results, and the overrides.

    Its stages run forwards alone, in the order of 1f1b; optimizer, ZeRO and offloading do not matter.

    Raises:
        RequestError: an override is wrong, or breaks a rule; the error contains all problems.
    """
    saved = _record(run_dir).config
    container = {key: saved[key] for key in _KEPT if key in saved}
    schedule, trainer = saved.get("schedule", {}), saved.get("trainer", {})
    halves = 2 if schedule.get("variant") == "halving" else 1
    container |= {
        "name": saved.get("name", "run"),
        "schedule": {"name": "1f1b", "microbatches": halves * schedule.get("microbatches", 1)},
        "partition": {"name": "parameters"},
        "optimizer": {"name": "auto" if saved.get("optimizer", {}).get("name") == "auto" else "sgd"},
        "trainer": {key: trainer[key] for key in ("threads", "ema_decay") if key in trainer},
        "checkpoint": {"allow_pickle": saved.get("checkpoint", {}).get("allow_pickle", [])},
        "logger": {"name": "none"},
        "memory_limit": _UNLIMITED,
    }
    container["data"] = container["data"] | {"drop_last": False}
    config = amended(container, overrides)
    raise_problems([*rules(config), *schedule_problems(config), *missing_packages(config).values()])
    if config.launcher.name != "local":
        why = "An evaluation starts its ranks on this machine"
        raise RequestError([Problem("launcher", config.launcher.name, "must be local", why, "launcher=local")])
    return config


def _run(config: RunConfig, asked: EvaluationRequest) -> tuple[dict[str, int], dict[str, float]] | Outcome:
    """The layout and the figures that rank 0 has left; none for predictions."""
    from runner.launch.run.measured_plan import measured_plan

    raise_problems(_missing_sets(config, asked.sets))
    plan = measured_plan(config)
    raise_problems(plan.problems)
    place = Path(tempfile.mkdtemp(prefix="runner-evaluate-"))
    try:
        file = write_request(config, plan, place, command="runner evaluate")
        asked.save(place)
        size, threads = plan.topology.world_size, config.trainer.threads
        outcome = run_ranks(Launch(file, place, size, threads, place_of(plan), entry=_ENTRY, to_stderr=True))
        if outcome.exit_status != EXIT_OK:
            return outcome
        result = place / RESULT_FILE
        return dict(plan.layout), json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _missing_sets(config: RunConfig, sets: Sequence[str]) -> Iterator[Problem]:
    """Problems with sets that the data does not have: ranks would tell of them when the model has been profiled."""
    from runner.model.apart import ApartError, apart

    try:
        there = apart(_sets_of, config)
    except (ApartError, RunnerError):  # what is wrong with the data is told when the model is profiled
        return
    wanted = sets or ([] if {"validation", "test"} & {*there} else ["validation"])
    for name in [name for name in wanted if name not in there]:
        fix = "--set train" if "train" in there else ""
        yield Problem("--set", name, "must be a set of the data", f"{config.data.target} returns no {name} set", fix)


def _sets_of(config: RunConfig) -> list[str]:
    from runner.model.data import load_datasets
    from runner.model.targets import import_users_code

    import_users_code(config)
    found = load_datasets(config.data, config.seed, with_test=True)
    return [name for name in SETS if getattr(found, name) is not None]
