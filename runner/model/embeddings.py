"""Puts tensor trains in the place of a model's embeddings and of named linear layers, ``embedding=tensor_train``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from runner.config.schema import EmbeddingConfig
from runner.errors import Problem, RequestError, did_you_mean
from runner.model.layers import LayerSource
from runner.model.seeds import mix_seed, seeded_with
from runner.model.tensor_train import CORES, TensorTrain, TensorTrainEmbedding, TensorTrainLinear, core_shapes

__all__ = [
    "has_tensor_trains",
    "is_core",
    "make_dense",
    "train_problems",
    "with_tensor_trains",
    "with_tensor_trains_later",
]

_PATH = "embedding.targets"


def with_tensor_trains(made: Any, config: EmbeddingConfig) -> Any:
    """What a model function returned, with tensor trains. A model whose layers are built later gets them there.

    Raises:
        RequestError: a named layer cannot be a train, or shares its weight with a layer that is none.
    """
    if config.name != "dense" and isinstance(made, nn.Module):
        _replace(made, str, config)
    return made


def with_tensor_trains_later(sources: Sequence[LayerSource], config: EmbeddingConfig, seed: int) -> list[LayerSource]:
    """The layers of such a model; those that do not exist yet get their trains when they are built."""
    if config.name == "dense":
        return list(sources)

    def source(one: LayerSource) -> LayerSource:
        def named(place: str) -> str:
            return one.full_name(place.removeprefix("layer").removeprefix("."))

        def build() -> nn.Module:
            with seeded_with(mix_seed(seed, one.index, "embedding")):
                holder = nn.ModuleDict({"layer": one.build()})  # the layer may itself be an embedding
                _replace(holder, named, config)
                return holder["layer"]

        return one if one.given is not None else replace(one, build=build)

    return [source(one) for one in sources]


def has_tensor_trains(module: nn.Module) -> bool:
    """Whether a part of the module is a train."""
    return any(isinstance(each, TensorTrain) for each in module.modules())


def train_problems(names: Sequence[str], targets: Sequence[str]) -> Iterator[Problem]:
    """Patterns of ``embedding.targets`` that match no layer's name.

    Args:
        names: the names of all modules of the model.
        targets: the patterns.
    """
    for target in targets:
        if not any(fnmatchcase(name, target) for name in names):
            near = did_you_mean(target, [name for name in names if name])
            why = f"The nearest name is {near}" if near is not None else "No layer has such a name"
            meant = ",".join(near if each == target else each for each in targets) if near is not None else ""
            yield Problem(_PATH, target, "must match names of layers", why, f"'{_PATH}=[{meant}]'" if meant else "")


def is_core(name: str) -> bool:
    """Whether a weight is a core of a train."""
    return f".{CORES}." in f".{name}"


def make_dense(model: nn.Module) -> None:
    """Put tables in the place of trains: embeddings and linear layers as torch has them."""
    for place, module in list(model.named_modules()):
        if isinstance(module, TensorTrainEmbedding | TensorTrainLinear):
            above, _, child = place.rpartition(".")
            setattr(model.get_submodule(above), child, module.dense())


def _replace(model: nn.Module, named: Callable[[str], str], config: EmbeddingConfig) -> None:
    """Put the trains in.

    Args:
        model: what holds the layers.
        named: the name of a layer in the whole model, from that in ``model``.
        config: says which layers become trains.
    """
    trains: dict[int, TensorTrain] = {}
    holders = _holders_of_weights(model)
    below = [(place, module) for place, module in model.named_modules() if place]
    for place in [place for place, module in below if _is_chosen(module, named(place), config)]:
        above, _, child = place.rpartition(".")
        module = model.get_submodule(place)
        assert isinstance(module, nn.Embedding | nn.Linear)
        train = trains.setdefault(id(module.weight), _train(module.weight, config))
        holders[id(module.weight)] -= 1
        if isinstance(module, nn.Embedding):
            made: nn.Module = TensorTrainEmbedding(train, module.padding_idx)
        else:
            made = TensorTrainLinear(train, module.bias)
        setattr(model.get_submodule(above), child, made)
    if any(holders[weight] for weight in trains):
        rule = "must name all layers that share a weight"
        why = "A layer that is not named reads a table that becomes a train"
        raise RequestError([Problem(_PATH, list(config.targets), rule, why)])


def _holders_of_weights(model: nn.Module) -> dict[int, int]:
    """How many modules hold each weight as their own."""
    found: dict[int, int] = {}
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None:
                found[id(weight)] = found.get(id(weight), 0) + 1
    return found


def _is_chosen(module: nn.Module, name: str, config: EmbeddingConfig) -> bool:
    """Whether the layer becomes a train: a pattern names it or, if there is none, it is an embedding that shrinks."""
    if not any(fnmatchcase(name, target) for target in config.targets):
        return not config.targets and _is_embedding(module) and _num_numbers(module, config) < module.weight.numel()
    if not _is_embedding(module) and type(module) is not nn.Linear:
        rule, why = "must name embeddings and linear layers", f"{name} is a {type(module).__name__}"
        raise RequestError([Problem(_PATH, list(config.targets), rule, why)])
    assert isinstance(module.weight, Tensor)
    number, (rows, columns) = _num_numbers(module, config), module.weight.shape
    if number >= module.weight.numel():
        rule = "must make trains smaller than their tables"
        why = f"{name} of {rows} x {columns} has {rows * columns:,} numbers, its cores would have {number:,}"
        raise RequestError([Problem("embedding.rank", config.rank, rule, why)])
    return True


def _is_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    return type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq


def _num_numbers(module: nn.Module, config: EmbeddingConfig) -> int:
    """The numbers in the cores."""
    assert isinstance(module.weight, Tensor)
    rows, columns = module.weight.shape
    return sum(map(math.prod, core_shapes(rows, columns, rank=config.rank, count=config.factors)))


def _train(weight: Tensor, config: EmbeddingConfig) -> TensorTrain:
    spread = 1.0 if is_fake(weight) or weight.is_meta else float(weight.detach().std())
    made = TensorTrain(*weight.shape, rank=config.rank, count=config.factors, spread=spread, like=weight)
    return made.requires_grad_(weight.requires_grad)
