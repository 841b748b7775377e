"""Writes a run's weights as a folder: of ``transformers``, of PEFT, or torch's distributed checkpoint."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from runner.config.compose.resolve import config_from_container
from runner.config.schema import ModelConfig, RunConfig
from runner.config.units import parse_bytes
from runner.errors import Problem, RequestError, RunFailedError
from runner.model.adapter import (
    adapted,
    is_adapters,
    merge_adapters,
    name_in_peft,
    names_of_base,
    peft_settings,
)
from runner.model.embeddings import is_core, make_dense
from runner.model.layers import build_stage, layers_of
from runner.model.load import load_model
from runner.model.make import make_model
from runner.model.pretrained.files import CONFIG, is_folder, stored_tensors
from runner.model.pretrained.two_of_one import untie_as
from runner.model.pretrained.weights import PretrainedWeights
from runner.model.targets import call_function, import_users_code
from runner.model.ties import find_ties, tied_names, with_all_names
from runner.record import RunRecord
from runner.targets import import_target

__all__ = ["merged", "write_adapter", "write_checkpoint", "write_pretrained"]

_ADAPTER_FILE = "adapter_model.safetensors"
_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja")
"""Ends of the names of tokenizers', templates' and generation's files."""


def write_pretrained(weights: Mapping[str, Tensor], folder: Path, source: Path, max_shard_size: str) -> None:
    """Write a folder that ``from_pretrained`` opens, with the tokenizer's and other files of ``model.pretrained``.

    A run from fresh weights gets the files that its data function has beside the weights: its tokenizer's.

    Args:
        weights: the tensors by global name, in the type that is written.
        folder: must not exist, or be empty.
        source: the run's directory, or a checkpoint in it.
        max_shard_size: the most bytes of one file, as ``5GB``.

    Raises:
        RequestError: the run's model is none of transformers, or the folder cannot be placed there.
        RunFailedError: the file system refuses, or the folder differs when it is read back.
    """
    config = _config_of(source)
    model = _model_of(config)
    _hold(model, weights)
    with _folder_beside(folder) as place:
        _quietly(lambda: model.save_pretrained(place, max_shard_size=parse_bytes(max_shard_size)))  # type: ignore[operator]
        _carry_over(config, place)
        _compare(model, place)


def merged(weights: Mapping[str, Tensor], source: Path) -> Mapping[str, Tensor]:
    """The weights by the model's own names: adapters are added to what they are beside, trains multiplied.

    Args:
        weights: the tensors by global name.
        source: the run's directory, or a checkpoint in it.

    Raises:
        RequestError: there are adapters or trains, and no record says how they were made.
    """
    if not any(is_adapters(name) or is_core(name) for name in weights):
        return weights
    config = _config_of(source)
    import_users_code(config, model_alone=True)  # weights need neither its data nor its loss
    layers = load_model(config, cut=False).layers
    whole = build_stage(layers, 0, len(layers) - 1)
    whole.load_global_state(dict(weights))
    merge_adapters(whole)
    make_dense(whole)
    dtypes = {name: value.dtype for name, value in weights.items()}
    named = names_of_base(config.adapter)
    kept = {named(name): dtype for name, dtype in dtypes.items()}
    return {name: value.to(kept.get(name, value.dtype)) for name, value in whole.global_state().items()}


def write_adapter(weights: Mapping[str, Tensor], folder: Path, source: Path) -> dict[str, Tensor]:
    """Write a folder of the run's adapter that PEFT opens on the model that the run started from.

    Args:
        weights: the tensors by global name, in the type that is written.
        folder: must not exist, or be empty.
        source: the run's directory, or a checkpoint in it.

    Returns:
        what was written, by PEFT's names.

    Raises:
        RequestError: the run has no adapter, or the folder cannot be placed there.
        RunFailedError: the file system refuses, or the file differs when it is read back.
    """
    config = _config_of(source)
    if config.adapter.name == "none":
        rule, why = "needs a run with an adapter", "Its request has adapter=none"
        raise RequestError([Problem("--format", "peft", rule, why, "--format safetensors")])
    import_users_code(config, model_alone=True)  # weights need neither its data nor its loss
    settings = peft_settings(adapted(make_model(config.model, initialise=False), config.adapter), config.adapter)
    settings.base_model_name_or_path = config.model.pretrained
    held = {name_in_peft(name): value for name, value in weights.items() if is_adapters(name)}
    with _folder_beside(folder) as place:
        settings.save_pretrained(place)
        save_file(held, place / _ADAPTER_FILE, {"format": "pt"})
        read = load_file(place / _ADAPTER_FILE)
        _refuse_differences([name for name in {**held, **read} if not _same(held.get(name), read.get(name))])
    return held


def write_checkpoint(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a folder of torch's distributed checkpoints, and read it back to compare.

    Args:
        weights: the tensors by global name.
        folder: must not exist, or be empty.

    Raises:
        RequestError: the folder cannot be placed there.
        RunFailedError: the file system refuses, or the folder differs when it is read back.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    with _folder_beside(folder) as place:
        _quietly(lambda: save(dict(weights), checkpoint_id=str(place), no_dist=True))
        read = {name: stored.read() for name, stored in stored_tensors(str(place)).items()}
        _refuse_differences([name for name in {**weights, **read} if not _same(weights.get(name), read.get(name))])


def _config_of(source: Path) -> RunConfig:
    run_dir = source if (source / "record.json").is_file() else source.absolute().parent.parent
    try:
        return config_from_container(RunRecord.load(run_dir).config)
    except (FileNotFoundError, ValueError) as error:
        why = f"Its record names the model, and {run_dir} has none"
        raise RequestError([Problem("RUN_DIR", source, "must be a run's directory", why)]) from error


def _model_of(config: RunConfig) -> nn.Module:
    """The run's model with weights that are still to be set.

    Raises:
        RequestError: it cannot be saved as models of transformers are.
    """
    import_users_code(config, model_alone=True)  # weights need neither its data nor its loss
    named = config.model.pretrained
    if named is not None and config.model.config_file and is_folder(named) and not Path(named, CONFIG).is_file():
        why = f"The architecture is that of its {CONFIG}, which is not there any more"
        raise RequestError([Problem("model.pretrained", named, f"must hold {CONFIG}", why)])
    made = make_model(config.model, initialise=False)
    if not isinstance(made, nn.Module) or not callable(getattr(made, "save_pretrained", None)):
        rule, why = "needs a model of transformers", f"model.target={config.model.target} has no save_pretrained"
        raise RequestError([Problem("--format", "huggingface", rule, why, "--format safetensors")])
    return made


def _hold(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set the model's weights, whose type becomes the model's."""
    untie_as(model, tied_names(layers_of(model, 0)), weights)
    state = with_all_names(weights, find_ties(layers_of(model, 0)))
    floating = next((value.dtype for value in weights.values() if value.is_floating_point()), torch.float32)
    model.to(floating)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise RunFailedError(f"the weights are not those of the run's model: {error}") from error


@contextlib.contextmanager
def _folder_beside(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of ``folder`` when it is complete.

    Raises:
        RequestError: there is something already.
        RunFailedError: the file system refuses.
    """
    parent = folder.absolute().parent
    if not parent.is_dir() or folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        rule, why = "must be a new folder in one that exists", "There is something" if folder.exists() else ""
        raise RequestError([Problem("FOLDER", folder, rule, why)])
    temporary = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        temporary.replace(folder)
    except OSError as error:
        raise RunFailedError(f"{folder} could not be written: {error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


def _quietly(write: Callable[[], Any]) -> None:
    """Write without the library's bars and advice."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        with contextlib.suppress(ImportError):
            from transformers.utils import logging as told

            told.disable_progress_bar()  # type: ignore[no-untyped-call]
        write()


def _carry_over(config: RunConfig, place: Path) -> None:
    """Copy what belongs beside weights and configuration: a tokenizer, a template, generation's settings."""
    for file in _beside_weights(config):
        shutil.copyfile(file, place / file.name)


def _beside_weights(config: RunConfig) -> list[Path]:
    """The files of the pretrained folder; without one those that the data function's ``beside_weights`` names."""
    named = config.model.pretrained
    if named is not None and is_folder(named):
        listed = sorted(Path(named).iterdir()) if Path(named).is_dir() else []
        return [file for file in listed if file.is_file() and _is_beside_weights(file)]
    told = getattr(import_target("data.target", config.data.target), "beside_weights", None)
    return call_function("data", config.data.target, told, config.data.kwargs) if told is not None else []


def _is_beside_weights(file: Path) -> bool:
    return file.suffix in _BESIDE_WEIGHTS and file.name != CONFIG and ".index." not in file.name


def _compare(model: nn.Module, place: Path) -> None:
    """Read the folder as a run would, and compare it with the model.

    Raises:
        RunFailedError: a tensor differs.
    """
    written = PretrainedWeights(replace(ModelConfig(), pretrained=str(place)), model)
    state = model.state_dict()
    ties = {name: [each for _, each in tie.places] for tie in find_ties(layers_of(model, 0)) for _, name in tie.places}
    different = []
    for name, value in state.items():
        making = written.making(ties.get(name, [name]))
        made = making.read() if making is not None else {}
        same = any(_same(value, made.get(each)) for each in ties.get(name, [name]))
        if not same and not written.may_be_absent(name):
            different.append(name)
    _refuse_differences(different)


def _refuse_differences(different: list[str]) -> None:
    if different:
        raise RunFailedError(f"what was written differs when it is read back: {', '.join(different[:3])}")


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)
