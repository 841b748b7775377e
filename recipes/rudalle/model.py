"""Malevich: a decoder over a caption and an image, described as layers that are built one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from runner.recipes.rudalle.layers import Embedding, Head, MalevichConfig, SandwichLayer
from runner.recipes.rudalle.masks import MaskKind, layer_kinds

__all__ = ["Malevich", "assemble", "build"]

_CHOICES = {"attention": ("eager", "sdpa"), "init": ("reference", "scratch"), "gelu": ("fused", "formula")}


class Malevich(nn.Module):
    """The description of the model: it holds no weights until a layer of :meth:`layers` is called."""

    def __init__(self, config: MalevichConfig) -> None:
        super().__init__()
        self.config = config

    def layers(self) -> list[Callable[[], nn.Module]]:
        """Embedding, transformer layers, head, each a callable that builds it with fresh weights."""
        config = self.config
        kinds: list[MaskKind] = layer_kinds(config.layers) if config.masks else ["causal"] * config.layers
        return [
            partial(Embedding, config),
            *(partial(SandwichLayer, config, kind) for kind in kinds),
            partial(Head, config),
        ]


def build(**kwargs: Any) -> Malevich:
    """The model of :class:`~runner.recipes.rudalle.layers.MalevichConfig`'s arguments.

    Its input is [batch, text_length + grid² - 1] ids: the caption's, then the image's without the last. Its
    output is (text logits, image logits), for targets [batch, same] that hold the same positions' next ids.

    Raises:
        TypeError: an unknown or missing argument.
        ValueError: an argument that no model can have.
    """
    config = MalevichConfig(**kwargs)
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise ValueError(f"{name} = {getattr(config, name)!r} must be one of {', '.join(choices)}")
    if config.layers < 1:
        raise ValueError(f"layers = {config.layers} must be at least 1")
    if config.width % config.heads:
        raise ValueError(f"heads = {config.heads} must divide width = {config.width}")
    if config.text_positions is not None and config.text_positions < config.text_length:
        raise ValueError(f"text_positions = {config.text_positions} must be at least text_length")
    return Malevich(config)


build.__signature__ = inspect.signature(MalevichConfig)  # type: ignore[attr-defined]  # names for error messages


def assemble(**kwargs: Any) -> nn.Sequential:
    """All layers in one module; its parameter names are ``<layer>.<name>``, as a run's weights have them."""
    return nn.Sequential(*(make() for make in build(**kwargs).layers()))
