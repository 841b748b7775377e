"""Compares pretrained weights and frozen names with a request's model, once, before any rank exists."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from torch import nn

from runner.config.schema import ModelConfig, RunConfig
from runner.errors import Problem, raise_problems, typed_word
from runner.model.adapter import names_of_base, target_problems
from runner.model.embeddings import train_problems
from runner.model.freeze import freeze_problems
from runner.model.layers import LayerSource, StageModule
from runner.model.load import LoadedModel, of_whole_model
from runner.model.pretrained.files import CONFIG, has_architecture, is_folder, stored_tensors
from runner.model.pretrained.fill import all_names
from runner.model.pretrained.two_of_one import differing_problems
from runner.model.pretrained.weights import PretrainedWeights

__all__ = ["pattern_problems", "planned_problems", "pretrained_problems"]

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
    raise_problems(_other_architecture(config))
    stored = stored_tensors(config.model.pretrained)
    return of_whole_model(config, partial(_differences, config, stored)) or []


def _differences(config: RunConfig, stored: Collection[str], loaded: LoadedModel, stage: StageModule) -> list[Problem]:
    weights, named = PretrainedWeights(config.model, loaded.made), names_of_base(config.adapter)
    own = {named(name): tuple(tensor.shape) for name, tensor in stage.global_state().items()}
    shapes = {name: shape for name, shape in own.items() if name is not None}
    wanted = all_names(loaded.layers, shapes, named)
    problems = [*weights.problems(shapes, wanted), *differing_problems(wanted, weights)]
    foreign = config.model.config_file is None and not set(stored) & set(own)
    if foreign and has_architecture(str(config.model.pretrained)):
        return [_told_otherwise(config, "None of its tensors has a name of this model")]
    if problems and (folder := _folder_meant(config.model)) is not None:
        return [_file_for_folder(config, folder)]
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
    named = config.model.pretrained
    reads = config.model.config_file is not None
    return [] if reads and named is not None and _is_architecture_alone(named) else pretrained_problems(config)


def _is_architecture_alone(named: str) -> bool:
    return has_architecture(named) and not any(Path(named).glob("*.safetensors*"))


def _other_architecture(config: RunConfig) -> Iterator[Problem]:
    """A problem if the folder has nothing that the model would read: a configuration, and no weights."""
    named = config.model.pretrained
    if config.model.config_file is None and named is not None and _is_architecture_alone(named):
        yield _told_otherwise(config, "It holds config.json alone")


def _told_otherwise(config: RunConfig, what: str) -> Problem:
    rule = f"must hold weights of model={config.model.name}"
    why = f"{what}, and this model does not read the architecture that {CONFIG} names"
    return Problem("model.pretrained", config.model.pretrained, rule, why, "model=huggingface")


def _folder_meant(model: ModelConfig) -> Path | None:
    """The folder of the named file, if the model's sizes stand there and were not read, because a file was named."""
    folder = Path(str(model.pretrained)).parent
    named_file = model.config_file is not None and not is_folder(str(model.pretrained))
    return folder if named_file and (folder / str(model.config_file)).is_file() else None


def _file_for_folder(config: RunConfig, folder: Path) -> Problem:
    """A single problem instead of one for each tensor, whose advice would be to leave the weights fresh."""
    rule = f"must fit the model that model={config.model.name} makes"
    why = f"A file names no architecture; {config.model.config_file} beside it does, and is read with the folder"
    return Problem("model.pretrained", config.model.pretrained, rule, why, typed_word("model.pretrained", folder))


def pattern_problems(config: RunConfig) -> list[Problem]:
    """Entries of ``trainer.freeze``, ``adapter.targets`` and ``embedding.targets`` that match nothing of the model.

    Raises:
        RequestError: the model cannot be made.
    """
    if not [*config.trainer.freeze, *config.adapter.targets, *config.embedding.targets]:
        return []
    return of_whole_model(config, partial(_unmatched, config)) or []


def _unmatched(config: RunConfig, loaded: LoadedModel, stage: StageModule) -> list[Problem]:
    names = all_names(loaded.layers, [stage.global_name(name) for name, _ in stage.named_parameters()])
    built = zip(loaded.layers, stage.layers, strict=True)
    modules = {name: each for source, module in built for name, each in _modules(source, module)}
    return [
        *freeze_problems([each for group in names.values() for each in group], config.trainer.freeze),
        *target_problems(modules, config.adapter.targets),
        *train_problems(list(modules), config.embedding.targets),
    ]


def _modules(source: LayerSource, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A layer and the modules in it by their names in the whole model, without those of adapters."""
    for place, each in module.named_modules(remove_duplicate=False):
        if ".lora_" not in f".{place}":
            yield source.full_name(place).removesuffix(".base_layer"), each
