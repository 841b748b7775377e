"""Small trained matrices beside frozen weights, ``adapter=lora``, as PEFT makes them.

PEFT replaces a layer, such as ``q_proj``, by one that holds it as ``q_proj.base_layer`` beside two matrices of its own,
``q_proj.lora_A.default`` and ``q_proj.lora_B.default``. All other weights of the model are frozen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch._guards import active_fake_mode

from runner.config.schema import AdapterConfig
from runner.errors import Problem, RequestError, did_you_mean, raise_problems
from runner.model.layers import LayerSource
from runner.model.seeds import mix_seed, seeded_with

__all__ = [
    "adapted",
    "adapted_layers",
    "is_adapters",
    "merge_adapters",
    "name_in_peft",
    "names_of_base",
    "peft_settings",
    "target_problems",
]

_TARGETS = "adapter.targets"
_BASE = ".base_layer."
_OWN = re.compile(r"\.lora_(?:embedding_)?[AB]\.default(?=\.|$)")


def is_adapters(name: str) -> bool:
    """Whether a weight belongs to an adapter."""
    return _OWN.search(name) is not None


def names_of_base(config: AdapterConfig) -> Callable[[str], str | None]:
    """A function from a weight's name to that in the model without adapters; None for an adapter's own weight."""
    if config.name == "none":
        return str
    return lambda name: None if is_adapters(name) else f".{name}".replace(_BASE, ".")[1:]


def name_in_peft(name: str) -> str:
    """The name of an adapter's weight in a file of PEFT."""
    return f"base_model.model.{_OWN.sub(lambda found: found.group().removesuffix('.default'), name)}"


def adapted(made: Any, config: AdapterConfig) -> Any:
    """What a model function returned, with adapters. A model whose layers are built later gets them with its layers.

    Raises:
        RequestError: no layer has a name of ``adapter.targets``, PEFT cannot adapt one, or its weight is tied.
    """
    if config.name != "none" and isinstance(made, nn.Module) and any(True for _ in made.parameters()):
        _inject(made, config)
    return made


def adapted_layers(sources: Sequence[LayerSource], config: AdapterConfig, seed: int) -> list[LayerSource]:
    """The layers; those that do not exist yet get their adapters when they are built.

    Args:
        sources: the layers of what :func:`adapted` returned.
        config: the adapters.
        seed: the run's, from which each layer's adapters have their own.
    """
    if config.name == "none":
        return list(sources)

    def source(one: LayerSource) -> LayerSource:
        def build() -> nn.Module:
            with seeded_with(mix_seed(seed, one.index, "adapter")):
                return _adapted_layer(one.build(), one.name, config)

        return one if one.given is not None else replace(one, build=build)

    return [source(one) for one in sources]


def _adapted_layer(layer: nn.Module, name: str, config: AdapterConfig) -> nn.Module:
    """One layer of the model, which is frozen and gets the adapters of the targets that lie in it."""
    holder = nn.ModuleDict({"layer": layer.requires_grad_(False)})  # the layer may itself be a target
    places = [place for place, _ in layer.named_modules()]
    targets = [place for place in places if _is_target(_joined(name, place), config.targets)]
    if targets:
        _inject(holder, replace(config, targets=[_joined("layer", place) for place in targets]))
    return holder["layer"]


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _is_target(name: str, targets: Sequence[str]) -> bool:
    """Whether PEFT would take a module of this name: it is one of the targets, or ends with one."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def target_problems(modules: Mapping[str, nn.Module], targets: Sequence[str]) -> Iterator[Problem]:
    """Targets that no layer has.

    Args:
        modules: all modules of the model, by their names without adapters.
        targets: ``adapter.targets``.
    """
    names = list(modules)
    for target in targets:
        if not any(_is_target(name, [target]) for name in names):
            parts = target.count(".") + 1
            near = did_you_mean(target, sorted({".".join(name.split(".")[-parts:]) for name in names if name}))
            why = f"The nearest name is {near}" if near is not None else _names_there_are(modules)
            meant = ",".join(near if each == target else each for each in targets) if near is not None else ""
            yield Problem(_TARGETS, target, "must name layers", why, f"'{_TARGETS}=[{meant}]'" if meant else "")


def _names_there_are(modules: Mapping[str, nn.Module]) -> str:
    """The last parts of the names of modules that have a matrix, beside which an adapter could stand."""
    weights = ((name, getattr(module, "weight", None)) for name, module in modules.items())
    found = {name.rpartition(".")[2] for name, weight in weights if isinstance(weight, Tensor) and weight.dim() > 1}
    has = f"; it has {', '.join(sorted(found))}" if found else ""
    return f"No layer of the model has this name, or one that ends so{has}"


def _inject(model: nn.Module, config: AdapterConfig) -> None:
    """Put adapters into the model, and freeze all other weights."""
    from peft import inject_adapter_in_model

    asked = list(config.targets)
    try:
        with _staying_fake():
            inject_adapter_in_model(_settings(config), model)
    except ValueError as error:
        raise_problems(target_problems(dict(model.named_modules()), asked))
        rule = "must name layers that PEFT can adapt" if asked else "must name layers"
        why = str(error) if asked else f"PEFT knows none for a {type(model).__name__}"
        raise RequestError([Problem(_TARGETS, asked, rule, why)]) from error
    _refuse_tied(model, asked)


@contextmanager
def _staying_fake() -> Iterator[None]:
    """Where tensors are fake, ``Module.to`` returns the module as it is: torch cannot move one to where it is already.

    PEFT moves each of its matrices to the device of the layer beside which it lies.
    """
    if active_fake_mode() is None:
        yield
        return
    with patch.object(nn.Module, "to", lambda module, *_, **__: module):
        yield


def _refuse_tied(model: nn.Module, asked: Sequence[str]) -> None:
    """Refuse targets whose weight other layers use too: merging would change it for them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for found in names.values():
        if len(found) > 1 and any(_BASE in f".{name}" for name in found):
            rule, why = "must name layers with weights of their own", f"{' and '.join(found)} are one tied weight"
            raise RequestError([Problem(_TARGETS, list(asked), rule, why)])


def _settings(config: AdapterConfig) -> Any:
    """The request's settings as PEFT's."""
    from peft import LoraConfig

    targets = list(config.targets) or None
    scale: Any = config.alpha  # PEFT's type says int, and any number is taken
    return LoraConfig(r=config.rank, lora_alpha=scale, lora_dropout=config.dropout, target_modules=targets)


def peft_settings(model: Any, config: AdapterConfig) -> Any:
    """PEFT's settings of what :func:`adapted` returned, with the targets that PEFT has chosen if none are named."""
    found = getattr(model, "peft_config", {}).get("default")
    return found if found is not None else _settings(config)


def merge_adapters(model: nn.Module) -> None:
    """Add the adapters to the weights beside which they are, and take them out of the model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
