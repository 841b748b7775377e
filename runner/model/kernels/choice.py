"""By what means of torch a request's model computes attention, norms, elementwise chains and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from runner.config.schema import LossConfig, RunConfig
from runner.errors import Problem
from runner.model.data import LossFunction
from runner.model.kernels.attention import Attention
from runner.model.kernels.substituting import Substituting, counted, substituting_of
from runner.model.layers import LayerSource
from runner.model.traced.operators import Program

__all__ = ["Kernels", "kernels_of"]

_WHAT = {
    "attention": ("an attention", "The model never calls torch's scaled_dot_product_attention"),
    "norm": ("a norm", "The model has no norm of simple operators; torch's layer_norm is one operator already"),
    "elementwise": ("an elementwise chain", "No chain of the model keeps more than what it reads"),
    "loss": ("a linear map whose output the loss alone reads", "The last layer does not end in one"),
}
_TRACED = ("fused", "liger")
_DIVIDED = "Ranks divide its layers, and exchange between operators what a trace would not repeat"
_SIMPLE = {
    "norm": "The model calls neither layer_norm nor rms_norm of torch",
    "elementwise": "The model calls neither gelu nor silu of torch",
}
_OF_LIGER = {
    "norm": "The model has no layer norm or RMS norm over the last axis whose weights and values have one format",
    "elementwise": "No silu, or gelu of the tanh formula, is multiplied by a value of its size and format",
}


def kernels_of(config: RunConfig, *, own_loss: bool = False) -> Kernels | None:
    """What the request asks for, or None if torch chooses.

    Args:
        config: the request.
        own_loss: whether the model brings its loss.
    """
    asked = {switch: getattr(config.kernels, switch) for switch in _WHAT if getattr(config.kernels, switch) is not None}
    substitutions = config.kernels.substitutions
    if not asked and not substitutions:
        return None
    why_not: dict[str, str] = {}
    if config.parallelism.tensor > 1:
        why_not = dict.fromkeys(("norm", "elementwise", "loss"), _DIVIDED)
    elif asked.get("loss") in _TRACED:
        from runner.model.kernels.head import why_no_fused_loss

        why_not = {"loss": why_no_fused_loss(config, own_loss=own_loss)}
    divided = _DIVIDED if config.parallelism.tensor > 1 else ""
    return Kernels(
        asked,
        config.kernels.name,
        {each: why for each, why in why_not.items() if why},
        substituting_of(config.kernels.name, substitutions, divided),
    )


class Kernels:
    """Computes layers as asked.

    Args:
        asked: ``eager``, ``fused`` or ``liger`` by switch.
        preset: the one of these that is wanted of all its switches, as far as the model has what they are for.
        why_not: why what a switch would fuse cannot be one operator.
        substitutions: what is replaced in the traces of layers.

    Attributes:
        found: the switches for which there is something in the model, as far as layers have run.
        left: why layers run as they are written.
    """

    def __init__(
        self,
        asked: Mapping[str, str],
        preset: str = "none",
        why_not: Mapping[str, str] = MappingProxyType({}),
        substitutions: Substituting | None = None,
    ) -> None:
        self.found: set[str] = set()
        self.left: dict[str, None] = {}
        self._asked, self._preset, self._why_not = asked, preset, why_not
        self._substitutions = substitutions or Substituting((), of_preset=False)
        self._attention = Attention(asked["attention"]) if "attention" in asked else None
        self._by_liger: dict[str, int] = {}  # places in training, by what is computed there
        self._chains, self._ligers = (
            frozenset(each for each in ("norm", "elementwise") if self._fuses(each) and asked[each] == means)
            for means in _TRACED
        )
        self._simple = frozenset(each for each in ("norm", "elementwise") if asked.get(each) == "eager")
        if asked.get("loss") == "eager":
            self.found.add("loss")  # no model's head is one operator with a loss of the runner

    @property
    def runs_traces(self) -> bool:
        """Whether layers run operators of their traces."""
        chains = bool(self._chains | self._ligers)
        return chains or self._fuses("loss") or self._substitutions.changes_traces

    def _fuses(self, switch: str) -> bool:
        return self._asked.get(switch) in _TRACED and switch not in self._why_not

    def around(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function, a layer, with these kernels."""
        inner = function if self._attention is None else self._attention.around(function)
        if not self._simple:
            return inner
        from runner.model.kernels.composites import Composites

        def run(value: Any) -> Any:
            with ExitStack() as held:
                held.enter_context(Composites(self._simple, self.found))
                return inner(value)

        return run

    def of_layers(self, layers: Sequence[LayerSource]) -> list[LayerSource]:
        """The layers, which run the operators of their traces if that is asked for."""
        made = [replace(layer, around=_both(layer.around, self.around)) for layer in layers]
        if not self.runs_traces:
            return made
        if self._substitutions.changes_traces and any(layer.step is not None for layer in layers):
            self._leave("a training_step of the model's own runs as it is written")
        from runner.model.kernels.layers import run_traces

        inner, last = (run_traces(self._changer(last=is_last), self._leave) for is_last in (False, True))
        return [_building(layer, last if layer is made[-1] else inner) for layer in made]

    def of_programs(self, programs: dict[bool, Program]) -> dict[bool, Program]:
        """The programs of a whole traced model, in training (True) and not."""
        if not self.runs_traces:
            return programs
        distinct = {id(program): program for program in programs.values()}
        made = {key: self._put_together(each, each is programs[True]) for key, each in distinct.items()}
        return {
            mode: self._ending(made[id(program)], last=True, training=mode) or made[id(program)]
            for mode, program in programs.items()
        }

    def loss(self, loss: LossFunction, config: LossConfig) -> LossFunction:
        """The loss, which takes what is left to it, too."""
        if not self._fuses("loss"):
            return loss
        from runner.model.kernels.head import loss_of_heads

        return loss_of_heads(loss, config, by_liger=self._asked["loss"] == "liger")

    def _changer(self, *, last: bool) -> Callable[[Program, bool], Program | None]:
        def change(program: Program, training: bool) -> Program | None:
            made = self._put_together(program, training)
            return self._ending(made, last=last, training=training) or (None if made is program else made)

        return change

    def _put_together(self, program: Program, training: bool) -> Program:
        """The program with substitutions, and with chains as single operators; itself if it has neither."""
        from runner.model.kernels.chains import fused

        made, found = fused(self._substitutions.program(program, training=training), self._chains)
        self.found |= found
        return self._with_liger(made, training=training) if self._ligers else made

    def _with_liger(self, program: Program, *, training: bool) -> Program:
        from runner.model.kernels.chains import fused
        from runner.model.kernels.liger import NORMS, operator_of

        def make(chain: Sequence[Node], given: Sequence[Node], graph: GraphModule) -> Node | None:
            made = operator_of(chain, given, graph)
            if made is not None and training:
                kind = str(made.args[1])
                self._by_liger[kind] = self._by_liger.get(kind, 0) + 1
            return made

        made, found = fused(program, self._ligers, make, NORMS)
        self.found |= found
        return made

    def _ending(self, program: Program, *, last: bool, training: bool) -> Program | None:
        """The program without the map that is left to the loss; None if there is none."""
        from runner.model.kernels.head import head_of

        made = head_of(program) if last and training and self._fuses("loss") else None
        if made is not None:
            self.found.add("loss")
            self._by_liger |= {"linear_cross_entropy": 1} if self._asked["loss"] == "liger" else {}
        return made

    def _leave(self, why: str) -> None:
        self.left[why] = None

    def problems(self) -> Iterator[Problem]:
        """Problems if there is nothing in the model for a switch that is named, or for any one of a preset's."""
        yield from self._substitutions.problems(list(self.left))
        is_empty = self._preset == "none" or len(self._missing()) == len(self._asked)
        for switch, why in self._missing().items():
            value = self._asked[switch]
            if value != self._preset or is_empty:
                path = f"kernels.{switch}"
                yield Problem(path, value, f"must find {_WHAT[switch][0]}", why, f"{path}=null")

    def notes(self) -> Iterator[str]:
        """What a preset leaves as it is, and why; and the layers that run as they are written."""
        for switch, why in self._missing().items():
            yield f"kernels={self._preset} leaves kernels.{switch} out: {why[0].lower()}{why[1:]}"
        yield from self._substitutions.notes(list(self.left))
        yield from self.left

    def substituted(self) -> tuple[str, ...]:
        """What is replaced in layers that differ, each with the number of its places."""
        return *self._substitutions.made(), *counted({f"Liger's {kind}": at for kind, at in self._by_liger.items()})

    def _missing(self) -> dict[str, str]:
        """The switches for which there is nothing in the model, each with the reason."""
        found = self.found | ({"attention"} if self._attention is not None and self._attention.found else set())
        missing: dict[str, str] = {}
        for switch, value in self._asked.items():
            if switch in found:
                continue
            own = _SIMPLE.get(switch) if value == "eager" else self._why_not.get(switch)
            own = own or (_OF_LIGER.get(switch) if value == "liger" else None)
            missing[switch] = own or _WHAT[switch][1]
        return missing


def _building(layer: LayerSource, install: Callable[[nn.Module], nn.Module]) -> LayerSource:
    return replace(layer, build=lambda: install(layer.build())) if layer.step is None else layer


def _both(
    inner: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] | None,
    outer: Callable[[Callable[[Any], Any]], Callable[[Any], Any]],
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    return outer if inner is None else lambda function: outer(inner(function))
