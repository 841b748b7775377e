"""Compares pretrained weights and frozen names with a request's model, once, before any rank exists."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.model.adapter import names_of_base
from runner.model.freeze import freeze_problems
from runner.model.layers import StageModule
from runner.model.load import LoadedModel, of_whole_model
from runner.model.pretrained.files import stored_tensors
from runner.model.pretrained.fill import all_names
from runner.model.pretrained.two_of_one import differing_problems
from runner.model.pretrained.weights import PretrainedWeights

__all__ = ["frozen_problems", "planned_problems", "pretrained_problems"]

logger = logging.getLogger(__name__)


def pretrained_problems(config: RunConfig) -> list[Problem]:
    """Tensors of ``model.pretrained`` that do not fit the model, a line for each; what stays fresh is logged.

    A run that continues from a checkpoint reads no pretrained weights. For a model that cannot be made here, the
    ranks compare.

    Raises:
        RequestError: the files are missing or wrong, or the model cannot be made.
    """
    if config.model.pretrained is None or config.resume not in (None, "auto"):
        return []
    stored_tensors(config.model.pretrained)
    return of_whole_model(config, partial(_differences, config)) or []


def _differences(config: RunConfig, loaded: LoadedModel, stage: StageModule) -> list[Problem]:
    weights, named = PretrainedWeights(config.model, loaded.made), names_of_base(config.adapter)
    own = {named(name): tuple(tensor.shape) for name, tensor in stage.global_state().items()}
    shapes = {name: shape for name, shape in own.items() if name is not None}
    wanted = all_names(loaded.layers, shapes, named)
    problems = [*weights.problems(shapes, wanted), *differing_problems(wanted, weights)]
    if not problems:
        for name in getattr(loaded.made, "untied", ()):
            told = "%s is trained as a weight of its own: the files hold another tensor than that which it is tied to"
            logger.warning(told, name)
        for name in weights.fresh(wanted):
            logger.info("stays fresh: %s", name)
    return problems


def planned_problems(config: RunConfig) -> list[Problem]:
    """What a plan refuses: all that a run does, but for weights that are not there yet beside their ``config.json``.

    Raises:
        RequestError: see :func:`pretrained_problems`.
    """
    folder = Path(config.model.pretrained or "")
    only_config = (folder / "config.json").is_file() and not any(folder.glob("*.safetensors*"))
    return [] if only_config else pretrained_problems(config)


def frozen_problems(config: RunConfig) -> list[Problem]:
    """Patterns of ``trainer.freeze`` that match no weight.

    Raises:
        RequestError: the model cannot be made.
    """
    if not config.trainer.freeze:
        return []
    return of_whole_model(config, partial(_unmatched, config.trainer.freeze)) or []


def _unmatched(patterns: Sequence[str], loaded: LoadedModel, stage: StageModule) -> list[Problem]:
    names = all_names(loaded.layers, [stage.global_name(name) for name, _ in stage.named_parameters()])
    return list(freeze_problems([each for group in names.values() for each in group], patterns))
