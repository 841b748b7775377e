"""A user's model as an ordered list of layers; a rank builds only its own layers.

A model function may return

- an ``nn.Sequential``: its children are the layers (unless it does more than run them: :mod:`runner.model.around`);
- a module with ``layers()``: a list of modules, or of zero-argument callables that make them. Callables are
  seeded one by one, so that a layer's weights do not depend on the rank that builds it;
- any other module: one layer, or a chain of segments if it is traced (:mod:`runner.model.load`).

The same module or parameter may be in several layers (:mod:`runner.model.ties`). The runner never initialises weights
again: it trains the weights that the function made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from runner.errors import Problem, RequestError, raise_problems
from runner.model.around import is_plain_chain, problems_around
from runner.model.boundary import call_arguments
from runner.model.buffers import overlaps, put_buffer, saved_shapes
from runner.model.odd_tensors import made_ready, odd_problems
from runner.model.seeds import mix_seed, seeded_with
from runner.model.ties import find_ties, first_names

__all__ = [
    "Around",
    "LayerSource",
    "LayerWrap",
    "Part",
    "StageModule",
    "build_stage",
    "call_whole",
    "draws_from_torch_alone",
    "keeps_running_statistics",
    "layers_of",
]

BeforeLayer = Callable[[int], None]


LayerWrap = Callable[[Callable[[Any], Any]], Callable[[Any], Any]]
"""Makes a function of a layer's function."""


@dataclass(frozen=True)
class LayerSource:
    """One layer that can be built.

    Args:
        index: its place in the model, from 0.
        name: prefix of its parameters' global names (without the dot); may be empty for a whole module.
        build: returns the layer's module.
        given: that module if it exists already, so that weights shared between layers can be found.
        label: its name in tables; default: ``name``.
        spread: whether the layer is a whole model, which takes a tuple as positional and a dict as keyword arguments.
        step: if the layer is the model's only one: called with ``(input, target)`` instead of the module, returns the
            loss.
        around: wraps the layer's function, or None.
        is_fine: whether a traced model is cut where two stages would not cut it, as more stages need more layers.
    """

    index: int
    name: str
    build: Callable[[], nn.Module]
    given: nn.Module | None = None
    label: str = ""
    spread: bool = False
    step: Callable[[Any], Any] | None = None
    around: LayerWrap | None = None
    is_fine: bool = False

    def calling(self, module: nn.Module) -> Callable[[Any], Any]:
        """The function from the layer's input to its output, for its built module."""
        own = self._calling(module)
        return own if self.around is None else self.around(own)

    def _calling(self, module: nn.Module) -> Callable[[Any], Any]:
        if self.step is not None:
            return self.step
        return partial(call_whole, module) if self.spread else module

    def full_name(self, local_name: str) -> str:
        """The global name of a parameter of the layer."""
        return ".".join(part for part in (self.name, local_name) if part)


def layers_of(model: Any, seed: int, target: str = "") -> list[LayerSource]:
    """The layers of ``model``, a return value of a model function.

    Raises:
        RequestError: it has no layers, or a weight or buffer that cannot be kept; a layer that is built later raises it
            then.
    """
    sources = _sources_of(model, seed, target)
    raise_problems(odd_problems(sources, target))
    for source in sources:
        if source.given is not None:
            made_ready(source.given)
    return sources


def _sources_of(model: Any, seed: int, target: str) -> list[LayerSource]:
    if is_plain_chain(model):
        children = model._modules.items()  # named_children() would leave out the second use of a module
        if not children:
            rule = "must have at least one layer"
            raise RequestError([Problem("model.target", target, rule, "It returned an empty Sequential")])
        return [_given(i, name, child) for i, (name, child) in enumerate(children) if child is not None]
    lister = getattr(model, "layers", None)
    if callable(lister) and not isinstance(lister, nn.Module):
        raise_problems(problems_around(model, target))
        return _listed_layers(model, list(lister()), seed, target)
    if isinstance(model, nn.Module):
        return [_given(0, "", model, spread=True)]
    rule = "must return an nn.Sequential, a module with layers(), or another nn.Module"
    raise RequestError([Problem("model.target", target, rule, f"It returned a {type(model).__name__}")])


def _listed_layers(model: Any, layers: Sequence[Any], seed: int, target: str) -> list[LayerSource]:
    if not layers:
        raise RequestError([Problem("model.target", target, "must have at least one layer", "layers() is empty")])
    own_names: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False) if isinstance(model, nn.Module) else ():
        own_names[id(module)].append(name)
    sources = []
    for index, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            names = own_names[id(layer)]
            name = names.pop(0) if len(names) > 1 else (names or [str(index)])[0]  # a second use has a second name
            sources.append(_given(index, name, layer))
        elif callable(layer):
            sources.append(_built_later(index, layer, mix_seed(seed, index), target))
        else:
            why = f"layers()[{index}] is a {type(layer).__name__}"
            rule = "must list modules, or callables that make them"
            raise RequestError([Problem("model.target", target, rule, why)])
    return sources


def _given(index: int, name: str, module: nn.Module, *, spread: bool = False) -> LayerSource:
    return LayerSource(index, name, lambda: module, module, spread=spread)


def _built_later(index: int, build: Callable[[], nn.Module], seed: int, target: str) -> LayerSource:
    def build_seeded() -> nn.Module:
        with seeded_with(seed):
            module = build()
        raise_problems(odd_problems([_given(index, str(index), module)], target))
        return made_ready(module)

    return LayerSource(index, str(index), build_seeded)


class Around(Protocol):
    """Runs a part of a stage in its own way."""

    def __call__(self, run: Callable[[Any], Any], value: Any, *, seeded: bool) -> Any:
        """Return what ``run(value)`` returns.

        Args:
            run: function that runs the part's layers; it may be called again in the backward.
            value: the part's input.
            seeded: whether every call of ``run`` seeds the random generators itself, layer by layer.
        """
        ...


@dataclass(frozen=True)
class Part:
    """Consecutive layers of a stage, and what wraps them.

    Args:
        first, last: indices in the whole model, inclusive.
        around: runs them in its own way; None = they are run plainly.
        inside: parts of this part, which are run instead of its layers and together are these layers, in order.
            Empty = the layers are run.
    """

    first: int
    last: int
    around: Around | None = None
    inside: tuple[Part, ...] = ()


class StageModule(nn.Module):
    """Consecutive layers of a model as one module.

    Parameters keep their global names (:meth:`global_name`), so that a checkpoint does not depend on the partition. A
    weight with several names has the first of them.

    Args:
        sources: the layers.
        first_names: for weights with several names: each name to the first one (:func:`runner.model.ties.first_names`).
    """

    def __init__(self, sources: Sequence[LayerSource], first_names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.first_layer = sources[0].index
        self.layer_names = tuple(source.name for source in sources)
        self.layers = nn.ModuleList(source.build() for source in sources)
        self._first_names = dict(first_names or {})
        self._sources = tuple(sources)
        self._parts: tuple[Part, ...] = (Part(self.first_layer, self.last_layer),)
        self._whole: Around | None = None
        self.note_built()

    @property
    def takes_targets(self) -> bool:
        """Whether its input is ``(input, target)``."""
        return self._sources[0].step is not None

    @property
    def last_layer(self) -> int:
        """The index of its last layer in the whole model."""
        return self.first_layer + len(self.layers) - 1

    def layers_between(self, first: int, last: int) -> list[nn.Module]:
        """The modules of layers ``first`` to ``last`` of the whole model, inclusive."""
        listed = list(self.layers)  # a slice of a ModuleList would build a module
        return listed[first - self.first_layer : last + 1 - self.first_layer]

    def wrap(self, parts: Sequence[Part], whole: Around | None = None) -> None:
        """Set what wraps parts of the stage, and the whole stage; parameters and their names stay the same.

        Args:
            parts: parts that together are all layers, in order.
            whole: wraps all parts together.

        Raises:
            ValueError: the parts are not the stage's layers in order.
        """
        covered = [index for part in parts for index in range(part.first, part.last + 1)]
        if covered != list(range(self.first_layer, self.last_layer + 1)):
            raise ValueError(f"parts {covered} are not the layers {self.first_layer} .. {self.last_layer}")
        self._parts, self._whole = tuple(parts), whole

    def forward(self, value: Any, before_layer: BeforeLayer | None = None) -> Any:
        """Run the layers in order; ``before_layer`` is called with each layer's index in the whole model."""
        run = partial(self._run_parts, self._parts, before_layer)
        return run(value) if self._whole is None else self._whole(run, value, seeded=before_layer is not None)

    def _run_parts(self, parts: Sequence[Part], before_layer: BeforeLayer | None, value: Any) -> Any:
        for part in parts:
            if part.inside:
                run = partial(self._run_parts, part.inside, before_layer)
            else:
                run = partial(self._run_layers, part.first, part.last, before_layer)
            value = run(value) if part.around is None else part.around(run, value, seeded=before_layer is not None)
        return value

    def _run_layers(self, first: int, last: int, before_layer: BeforeLayer | None, value: Any) -> Any:
        for index, layer in enumerate(self.layers_between(first, last), first):
            if before_layer is not None:
                before_layer(index)
            value = self._sources[index - self.first_layer].calling(layer)(value)
        return value

    def global_name(self, local_name: str) -> str:
        """The whole model's name of a parameter of this module, such as ``layers.2.weight``."""
        _, offset, rest = local_name.split(".", 2)
        name = self.layer_names[int(offset)]
        full = f"{name}.{rest}" if name else rest
        return self._first_names.get(full, full)

    def global_state(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by global name; each comes once."""
        return {self.global_name(name): value for name, value in self.state_dict().items()}

    def note_built(self) -> None:
        """Take the shapes that saved buffers have now for those that the model's function gives them."""
        self._built_shapes = saved_shapes(self)

    def grown_buffers(self) -> dict[str, tuple[int, ...]]:
        """The shapes of saved buffers, by global name, that forwards have made, or have given another shape."""
        shapes = saved_shapes(self)
        return {
            self.global_name(name): shape for name, shape in shapes.items() if self._built_shapes.get(name) != shape
        }

    def put_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Set buffers by global name, whatever their shapes are now; those of other stages are left out."""
        for full, value in buffers.items():
            for name, layer in zip(self.layer_names, self.layers, strict=True):
                prefix = f"{name}." if name else ""
                if full.startswith(prefix) and put_buffer(layer, full.removeprefix(prefix), value):
                    break

    def load_global_state(self, state: dict[str, torch.Tensor]) -> None:
        """Copy this stage's tensors from a whole model's state.

        Raises:
            KeyError: a tensor of this stage is missing.
        """
        own = self.state_dict()
        apart = {name for name, value in own.items() if overlaps(value)}  # nothing can be copied into them
        self.put_buffers({full: state[full] for full in map(self.global_name, apart)})
        self.load_state_dict({name: state[self.global_name(name)] for name in own if name not in apart}, strict=False)


def build_stage(sources: Sequence[LayerSource], first: int, last: int) -> StageModule:
    """Build the module of layers ``first`` to ``last``, both inclusive."""
    return StageModule(sources[first : last + 1], first_names(find_ties(sources)))


def draws_from_torch_alone(layer: nn.Module) -> bool:
    """Whether all modules of a layer are torch's own, which draw from no generator but torch's."""
    return all(type(module).__module__.startswith("torch.nn.") for module in layer.modules())


def keeps_running_statistics(layer: nn.Module) -> bool:
    """Whether a module keeps running averages of its inputs, like a batch norm."""
    return bool(getattr(layer, "track_running_stats", False))


def call_whole(model: Callable[..., Any], value: Any) -> Any:
    """Call a whole model with a batch's input: a tuple or list as positional, a dict as keyword arguments."""
    args, kwargs = call_arguments(value)
    return model(*args, **kwargs)
