"""Which modules of a model are divided among ranks, and how: the user's rules, the model's own, or transformers'.

Rules are patterns of module names, ``*`` for any part between dots, with one of the styles of
:data:`runner.model.sharded.wrap.STYLES`. The first source that a model has is used: ``parallelism.sharding``; a method
``tensor_plan()`` of the model or of a layer; the plan that a transformers model brings. An empty mapping names none, so
that only what the operators of a trace show is divided.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from runner.config.deepspeed import keeps_identities
from runner.config.schema import RunConfig
from runner.errors import Problem, did_you_mean, raise_problems
from runner.model.layers import LayerSource
from runner.model.sharded.adapters import DRAWS, divide_draws, has_adapter, ways_beside
from runner.model.sharded.experts import are_experts
from runner.model.sharded.group import ShardGroup
from runner.model.sharded.slices import PATH, slice_batches
from runner.model.sharded.transformers_plan import HEADS, completed, divide_heads
from runner.model.sharded.values import HeldPart, Shard
from runner.model.sharded.wrap import STYLES, divide, keep_apart, why_not
from runner.model.traced.operators import Program
from runner.optim.states.whole_norms import mark_as_part

__all__ = ["Division", "Rules", "division_of", "rules_of"]

_SHARDING = "parallelism.sharding"
_DEGREE = "parallelism.tensor"
_SEQUENCE = "parallelism.sequence"
_MOST_REASONS = 3
_TRANSFORMERS = "the model's transformers plan"

_OF_TRANSFORMERS = {
    "colwise": "column",
    "colwise_rep": "column_gathered",
    "colwise_gather_output": "column_gathered",
    "rowwise": "row",
    "rowwise_rep": "row_whole_input",
    "rowwise_split_input": "row_whole_input",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "partial",
    "replicate": "whole",
    "moe_tp_experts": "experts",
}
"""transformers' names of ways, which say the same."""

_EXPERTS = (
    "moe_identity_expert",
    "packed_colwise",
    "packed_rowwise",
    "grouped_gemm",
    "ep_dispatch_experts",
)
"""Further ways of mixtures of experts, and of their weights, which are divided with the module that has them."""


@dataclass(frozen=True)
class Rules:
    """Patterns of module names, each with a style.

    Args:
        patterns: the pattern and the style, the first that fits counts.
        source: where they come from, for messages.
    """

    patterns: tuple[tuple[str, str], ...]
    source: str

    def style_of(self, name: str) -> str | None:
        """The style of a module by its name, or None if no pattern fits."""
        return next((style for pattern, style in self.patterns if _fits(pattern, name)), None)


@dataclass
class Division:
    """A model's weights, divided among the ranks of a group.

    Args:
        group: the ranks.
        rules: what ``parallelism.sharding`` says, or None.
        sequence: whether values between layers shall be divided by tokens.
        sliced: patterns of modules of which each rank computes a part of the samples.

    Attributes:
        shards: the part of each divided weight by its global name; those of layers that are not built yet are missing.
        divides: whether there are rules for a module so far.
        left: why weights that were looked at are whole, where a trace was searched for what can be divided.
        programs: the model and its divided programs, of which a layer was made.
        logits: the name of the layer whose logits are not put together in training, because the loss takes parts.
        vocabulary: the number of these logits, of all ranks.
        gathered: the name of a layer of which all ranks put the features together, such as other logits.
        divides_tokens: whether values between layers are divided by tokens, so far.
        together: why tokens are together somewhere, although that was asked for.
    """

    group: ShardGroup
    rules: Rules | None = None
    sequence: bool = False
    sliced: tuple[str, ...] = ()
    shards: dict[str, Shard] = field(default_factory=dict)
    divides: bool = False
    left: list[str] = field(default_factory=list)
    programs: dict[nn.Module, tuple[nn.Module, dict[bool, Program]]] = field(default_factory=dict)
    logits: str = ""
    vocabulary: int = 0
    gathered: str = ""
    divides_tokens: bool = False
    together: list[str] = field(default_factory=list)
    _sliced: set[str] = field(default_factory=set)
    _named: list[str] = field(default_factory=list)
    _weights: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def is_of_transformers(self) -> bool:
        """Whether a plan of transformers says how layers are divided."""
        return self.rules is not None and self.rules.source == _TRANSFORMERS

    def problems(self, target: str) -> list[Problem]:
        """What is wrong when all layers have been built: nothing is divided, or a rule of the user's fits nothing."""
        asked = self.rules.patterns if self.rules and self.rules.source == _SHARDING else ()
        unused = list(unused_patterns(_SHARDING, [pattern for pattern, _ in asked], self._named))
        unused += list(unused_patterns(PATH, [each for each in self.sliced if each not in self._sliced], self._named))
        if not self.shards and not unused:
            why = "; ".join(self.left[:_MOST_REASONS]) or f"Nothing says how layers of {target} are divided"
            rule = "must divide a layer"
            fix = '"parallelism.sharding={blocks.*.up: column, blocks.*.down: row}"'
            return [Problem(_DEGREE, self.group.degree, rule, why, fix)]
        if self.sequence and not self.divides_tokens and not unused:
            rule = "must find values between layers that ranks can divide by tokens"
            why = "; ".join(self.together[:_MOST_REASONS]) or f"No layer of {target} sums over ranks for each token"
            return [Problem(_SEQUENCE, True, rule, why, f"{_SEQUENCE}=false")]
        return unused

    def elements_elsewhere(self) -> tuple[int, int]:
        """Elements of divided weights that other ranks have, and of those among them that are trained."""
        found: dict[int, tuple[int, bool]] = {}
        for name, shard in self.shards.items():
            weight = self._weights[name]
            found[id(weight)] = math.prod(shard.whole) - math.prod(shard.shape), weight.requires_grad
        return sum(count for count, _ in found.values()), sum(count for count, trained in found.values() if trained)

    def trained_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of the part of each divided weight that is trained, each once."""
        found = {id(weight): weight for weight in self._weights.values() if weight.requires_grad}
        return tuple(tuple(weight.shape) for weight in found.values())

    def take(self, model: nn.Module, shards: Mapping[str, Shard], layer: LayerSource | None = None) -> None:
        """Cut parameters, in place, to the parts that are given by their names in a model, or in a layer of it."""
        own = dict(model.named_parameters())
        for name, parameter in model.named_parameters(remove_duplicate=False):
            shard = next((shard for first, shard in shards.items() if own[first] is parameter), None)
            if shard is None:
                continue
            full = name if layer is None else layer.full_name(name)
            if full not in self.shards and tuple(parameter.shape) == shard.whole:
                with torch.no_grad():
                    parameter.data = shard.cut(parameter.data)
            self.shards[full] = shard
            self._hold(full, parameter)

    def _hold(self, name: str, weight: Any) -> None:
        """Note a weight that is a part, so that an optimizer knows how to sum over all parts."""
        self._weights[name] = weight
        mark_as_part(weight, HeldPart(self.shards[name], self.group))

    def of_given(self, layers: Sequence[LayerSource]) -> None:
        """Divide, in place, the layers that exist already."""
        self.apply([(layer.name, layer.given) for layer in layers if layer.given is not None])

    def of_later(self, layers: Sequence[LayerSource]) -> list[LayerSource]:
        """The layers; those that do not exist yet are divided when they are built."""

        def source(one: LayerSource) -> LayerSource:
            def build() -> nn.Module:
                module = one.build()
                self.apply([(one.name, module)])
                return module

            return one if one.given is not None else replace(one, build=build)

        return [source(one) for one in layers]

    def apply(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        """Divide modules in place, with all that is in them.

        Args:
            named: global names, and whole models or layers; what is tied to a weight of theirs is among them.

        Raises:
            RequestError: a rule names a module that cannot be divided.
        """
        places = list(self._places(named))
        self.divides |= any(place.rules is not None and place.rules.patterns for place in places)
        chosen = _with_tied(places)
        raise_problems(list(dict.fromkeys(problem for place in chosen for problem in self._problems_of(place))))
        raise_problems(list(_two_ways(chosen)))
        for place in chosen:
            style = place.style or "whole"
            if style in DRAWS:
                divide_draws(place.module, style, self.group)
                continue
            if style == HEADS:
                divide_heads(place.module, self.group)
                continue
            divide(place.module, place.name, style, self.group, self.shards)
            if self.logits and place.name == self.logits:
                self.vocabulary = keep_apart(place.module)
            elif place.style == "column_gathered":
                self.gathered = place.name
            for local, weight in place.module.named_parameters(recurse=False):
                if f"{place.name}.{local}" in self.shards:
                    self._hold(f"{place.name}.{local}", weight)
        found = list(slice_batches(named, self.sliced, self.group))
        raise_problems([problem for _, problem in found if problem is not None])
        self._sliced |= {pattern for pattern, _ in found}

    def _places(self, named: Sequence[tuple[str, nn.Module]]) -> Iterator[_Place]:
        for name, module in named:
            rules = self.rules or rules_of(module, name, self.group.degree)
            beside: dict[str, str] = {}  # ways of what is in layers with adapters
            for local, each in module.named_modules(remove_duplicate=False):
                full = ".".join(part for part in (name, local) if part)
                self._named.append(full)
                style = beside.get(full) if full in beside or rules is None else rules.style_of(full)
                if style is not None and has_adapter(each):
                    beside |= {f"{full}.{inner}": way for inner, way in ways_beside(each, style).items()}
                    style = None
                if style == "experts" and rules is not None and rules.source == _TRANSFORMERS:
                    style = style if are_experts(each) else "whole"
                yield _Place(full, each, rules, style)

    def _problems_of(self, place: _Place) -> Iterator[Problem]:
        style, degree = place.style or "whole", self.group.degree
        if style in DRAWS or (style == HEADS and place.rules is not None and place.rules.source == _TRANSFORMERS):
            return
        if (kind := style.partition(":")[0]) not in STYLES:
            near = did_you_mean(kind, STYLES)
            fix = f"{near} for {kind}" if near else ""
            yield Problem(_SHARDING, style, f"must be one of {', '.join(STYLES)}", fix=fix)
            return
        numbers = style.partition(":")[2]
        if numbers and not (re.fullmatch(r"\d+(:\d+)*", numbers, re.ASCII) and all(map(int, numbers.split(":")))):
            rule = f"must have whole numbers of at least 1 behind {kind}"
            yield Problem(_SHARDING, style, rule, fix=f"{kind}:2 for {style}")
            return
        why = why_not(place.module, style, degree)
        if why is not None:
            source = "ties" if place.rules is None else place.rules.source
            rule = f"must divide {place.name} ({style}, from {source})"
            yield Problem(_DEGREE, degree, rule, why, f"parallelism.tensor={degree // 2}")


@dataclass(frozen=True)
class _Place:
    """A module of a model, with its global name, the rules for it, and the way in which they divide it, or None."""

    name: str
    module: nn.Module
    rules: Rules | None
    style: str | None


_OTHER_SIDE = {"embedding": "column_gathered", "column": "embedding", "column_gathered": "embedding"}
"""How a module is divided that holds the weight of one which is divided so: an embedding, and the map to logits."""


def _with_tied(places: Sequence[_Place]) -> list[_Place]:
    """The places that are divided: those with a way, and those that hold a weight of one of them."""
    styles = {id(weight): place.style for place in places if place.style for weight in _own(place)}
    found = []
    for place in places:
        if place.style is not None:
            found.append(place)
            continue
        tied = next((styles[id(weight)] for weight in _own(place) if id(weight) in styles), None)
        if tied is not None and tied not in ("whole", "partial"):
            found.append(replace(place, style=_OTHER_SIDE.get(tied, tied)))
    return found


def _two_ways(places: Sequence[_Place]) -> Iterator[Problem]:
    """A problem for each module whose rule divides a weight otherwise than that of another module which holds it."""
    first: dict[int, _Place] = {}
    for place in places:
        for weight in _own(place):
            other = first.setdefault(id(weight), place)
            one, two = other.style or "whole", place.style or "whole"
            if two not in (one, _OTHER_SIDE.get(one)) and one != _OTHER_SIDE.get(two):
                rule = f"must divide {place.name} and {other.name} alike"
                why = f"They hold the same weight, and {other.name} is {one}"
                yield Problem(_SHARDING, two, rule, why, f"{_OTHER_SIDE.get(one, one)} for {place.name}")


def _own(place: _Place) -> list[nn.Parameter]:
    return list(place.module.parameters(recurse=False))


def division_of(config: RunConfig, made: Any, shard: int | None) -> Division | None:
    """How the weights of a request's model are divided, or None if they stay whole.

    Args:
        config: the request.
        made: what the model function returned.
        shard: the number of the part that is wanted; None: the whole is.
    """
    degree, asked = config.parallelism.tensor, config.parallelism.sharding
    if shard is None or degree == 1:
        return None
    group = ShardGroup(degree, shard, shares_entries=keeps_identities(config))
    sliced = tuple(map(str, config.parallelism.batch_sliced or ()))
    if asked is None:
        return Division(group, rules_of(made, degree=degree), config.parallelism.sequence, sliced)
    rules = Rules(tuple((str(pattern), way) for pattern, way in asked.items()), _SHARDING)  # a name may be a number
    return Division(group, rules, config.parallelism.sequence, sliced)


def rules_of(module: Any, name: str = "", degree: int = 1) -> Rules | None:
    """The rules that a model, or a layer, brings itself, for global names and so many ranks, or None."""
    own = getattr(module, "tensor_plan", None)
    if callable(own):
        prefix = f"{name}." if name else ""
        return Rules(tuple((prefix + pattern, style) for pattern, style in own().items()), "tensor_plan()")
    return _of_transformers(module, name, degree) if isinstance(module, nn.Module) else None


def _of_transformers(module: nn.Module, name: str, degree: int) -> Rules | None:
    for local, part in module.named_modules():
        base = getattr(getattr(part, "config", None), "base_model_tp_plan", None)
        if not base:
            continue
        prefix = ".".join(each for each in (name, local) if each)
        inner = getattr(part, "base_model_prefix", "")
        heads: Mapping[str, str] = getattr(type(part), "_tp_plan", None) or {}
        at = f"{inner}." if inner and hasattr(part, inner) else ""
        found = {**{at + pattern: style for pattern, style in base.items()}, **heads}
        start = f"{prefix}." if prefix else ""
        translated = {pattern: _translated(style) for pattern, style in found.items()}
        if any(style is None for style in translated.values()):
            return None
        table = _table_of_ids(part)
        ways = completed(part, {pattern: style for pattern, style in translated.items() if style}, degree)
        known = [(start + pattern, style) for pattern, style in ways.items()]
        known += [(start + table, "embedding")] if table is not None else []
        return Rules(tuple(known), _TRANSFORMERS)
    return None


def _table_of_ids(model: nn.Module) -> str | None:
    """The name of a transformers model's embedding of ids, which most of their plans leave whole."""
    given = getattr(model, "get_input_embeddings", None)
    try:
        table = given() if callable(given) else None
    except NotImplementedError:
        return None
    return next(
        (name for name, each in model.named_modules() if each is table and isinstance(each, nn.Embedding)), None
    )


def _translated(style: str) -> str | None:
    return "whole" if style in _EXPERTS else _OF_TRANSFORMERS.get(style)


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def unused_patterns(path: str, patterns: Sequence[str], names: Sequence[str]) -> Iterator[Problem]:
    """Problems with patterns of a key that fit no module."""
    for pattern in patterns:
        if not any(_fits(pattern, name) for name in names):
            near = did_you_mean(pattern, list(names))
            why = f"Did you mean {near}?" if near else "The model has no module of this name"
            yield Problem(path, pattern, "must name modules", why)
