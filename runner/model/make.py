"""Makes a request's model by its function."""

from __future__ import annotations

from typing import Any

from torch import nn

from runner.config.schema import ModelConfig
from runner.errors import raise_problems
from runner.model.layers import LayerSource, layers_of
from runner.model.modes import in_training
from runner.model.pretrained.files import config_problems, is_folder
from runner.model.pretrained.two_of_one import untie
from runner.model.seeds import seeded_with
from runner.model.targets import call_target
from runner.model.ties import tied_names

__all__ = ["load_layers", "make_model"]


def load_layers(config: ModelConfig, seed: int) -> list[LayerSource]:
    """Call the user's model function and list its layers.

    Raises:
        RequestError: the target cannot be imported, or does not return a model.
    """
    with seeded_with(seed):
        return layers_of(make_model(config), seed, config.target)


def make_model(config: ModelConfig, *, initialise: bool = True) -> Any:
    """The return value of the user's model function, which draws from generators that the caller has seeded.

    Args:
        config: names the function and its arguments.
        initialise: whether the weights need initial values; only functions that read a pretrained folder are told.

    Raises:
        RequestError: the target cannot be imported, or raises, or the pretrained folder lacks its configuration.
    """
    kwargs = config.kwargs
    if config.config_file is not None and config.pretrained is not None and is_folder(config.pretrained):
        raise_problems(config_problems(config.pretrained, config.config_file))
        kwargs = {**kwargs, "pretrained": config.pretrained, "initialise": initialise}
    made = call_target("model", config.target, kwargs)
    if config.pretrained is not None and callable(getattr(made, "untie", None)):
        untie(made, tied_names(layers_of(made, 0)), config)
    _keep_no_keys_and_values(made)
    return in_training(made)


def _keep_no_keys_and_values(made: Any) -> None:
    """Let a model of transformers return no keys and values of its tokens: they serve generation, and pass no stage."""
    for module in made.modules() if isinstance(made, nn.Module) else ():
        config: Any = getattr(module, "config", None)
        is_theirs = any(base.__module__.startswith("transformers.") for base in type(config).__mro__)
        if is_theirs and getattr(config, "use_cache", False):
            config.use_cache = False
