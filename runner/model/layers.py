"""A user's model as an ordered list of layers, of which a rank builds only its own.

A model function may return

- an ``nn.Sequential``: its children are the layers (unless it has a ``forward`` of its own);
- a module with ``layers()``: a list of modules, or of zero-argument callables that make them. Callables are
  seeded one by one, so that a layer's weights do not depend on who builds it;
- any other module: one layer, which cannot be cut.

The runner never initialises weights again: what the function made is what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.config.schema import ModelConfig
from runner.errors import Problem, RequestError
from runner.model.targets import call_target

__all__ = [
    "LayerSource",
    "StageModule",
    "build_stage",
    "layers_of",
    "load_layers",
    "mix_seed",
    "shared_weight_problems",
]

_MASK = (1 << 63) - 1


def mix_seed(*parts: int) -> int:
    """A 63-bit seed from integers; every part matters, also in order (splitmix64's finaliser)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK


@dataclass(frozen=True)
class LayerSource:
    """One layer that can be built.

    Args:
        index: its place in the model, from 0.
        name: what its parameters' global names start with (without the dot); may be empty for a whole module.
        build: returns the layer's module.
        given: that module where it exists already, so that weights shared between layers can be seen.
    """

    index: int
    name: str
    build: Callable[[], nn.Module]
    given: nn.Module | None = None


def load_layers(config: ModelConfig, seed: int) -> list[LayerSource]:
    """Call the user's model function and list its layers.

    Raises:
        RequestError: the target does not import, or returns something that is no model.
    """
    torch.manual_seed(seed)
    return layers_of(call_target("model", config.target, config.kwargs), seed, config.target)


def layers_of(model: Any, seed: int, target: str = "") -> list[LayerSource]:
    """The layers of ``model``, as a model function may return it."""
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        # _modules, because named_children leaves out a module that stands there a second time
        return [_given(i, name, child) for i, (name, child) in enumerate(model._modules.items()) if child is not None]
    lister = getattr(model, "layers", None)
    if callable(lister) and not isinstance(lister, nn.Module):
        return _listed_layers(model, list(lister()), seed, target)
    if isinstance(model, nn.Module):
        return [_given(0, "", model)]
    rule = "must return an nn.Sequential, a module with layers(), or another nn.Module"
    raise RequestError([Problem("model.target", target, rule, f"It returned a {type(model).__name__}")])


def _listed_layers(model: Any, layers: Sequence[Any], seed: int, target: str) -> list[LayerSource]:
    if not layers:
        raise RequestError([Problem("model.target", target, "must have at least one layer", "layers() is empty")])
    own_names = {id(m): name for name, m in model.named_modules()} if isinstance(model, nn.Module) else {}
    sources = []
    for index, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            sources.append(_given(index, own_names.get(id(layer), str(index)), layer))
        elif callable(layer):
            sources.append(LayerSource(index, str(index), _seeded(layer, mix_seed(seed, index))))
        else:
            why = f"layers()[{index}] is a {type(layer).__name__}"
            rule = "must list modules, or callables that make them"
            raise RequestError([Problem("model.target", target, rule, why)])
    return sources


def _given(index: int, name: str, module: nn.Module) -> LayerSource:
    return LayerSource(index, name, lambda: module, module)


def _seeded(build: Callable[[], nn.Module], seed: int) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(seed)
        return build()

    return seeded


class StageModule(nn.Module):
    """Consecutive layers of a model as one module.

    Parameters keep their global names (:meth:`global_names`), so that a checkpoint does not depend on the cut.
    """

    def __init__(self, sources: Sequence[LayerSource]) -> None:
        super().__init__()
        self.first_layer = sources[0].index
        self.layer_names = tuple(source.name for source in sources)
        self.layers = nn.ModuleList(source.build() for source in sources)

    def forward(self, value: Any, before_layer: Callable[[int], None] | None = None) -> Any:
        """Run the layers in order; ``before_layer`` is called with each layer's index in the whole model."""
        for offset, layer in enumerate(self.layers):
            if before_layer is not None:
                before_layer(self.first_layer + offset)
            value = layer(value)
        return value

    def global_name(self, local_name: str) -> str:
        """``layers.2.weight`` of this module as the whole model names it."""
        _, offset, rest = local_name.split(".", 2)
        name = self.layer_names[int(offset)]
        return f"{name}.{rest}" if name else rest

    def global_state(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by global name."""
        return {self.global_name(name): value for name, value in self.state_dict().items()}

    def load_global_state(self, state: dict[str, torch.Tensor]) -> None:
        """Copy this stage's tensors out of a whole model's state.

        Raises:
            KeyError: a tensor of this stage is missing.
        """
        self.load_state_dict({name: state[self.global_name(name)] for name in self.state_dict()})


def shared_weight_problems(sources: Sequence[LayerSource], partition: Sequence[tuple[int, int]]) -> list[Problem]:
    """Parameters that layers of different stages share: each rank would train its own copy.

    Args:
        sources: the layers.
        partition: first and last layer of each stage, both inclusive.
    """
    found: dict[int, tuple[int, str]] = {}
    problems = []
    for stage, (first, last) in enumerate(partition):
        for source in sources[first : last + 1]:
            for local_name, parameter in source.given.named_parameters() if source.given is not None else ():
                name = f"{source.name}.{local_name}" if source.name else local_name
                holder, held_name = found.setdefault(id(parameter), (stage, name))
                if holder != stage:
                    rule = f"layers that share a weight must be in one stage: {held_name} is {name}"
                    why = "Each would train a copy of its own"
                    held_by, fix = f"stages {holder}, {stage}", "parallelism.pipeline=1"
                    problems.append(Problem("partition", held_by, rule, why, fix))
    return problems


def build_stage(sources: Sequence[LayerSource], first: int, last: int) -> StageModule:
    """The module of layers ``first`` to ``last``, both inclusive."""
    return StageModule(sources[first : last + 1])
