"""Finds where a NaN or an infinity first appeared: it runs the window again and checks every layer.

Dropout depends only on step, micro-batch and layer, and the weights have not changed, so the second run makes the same
values as the first. It costs one window, once, when a run is lost anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.engine.transport.base import Transport
from runner.engine.update.gradients import StageGradients
from runner.engine.window import Window
from runner.model.boundary import flatten
from runner.model.data import LossFunction
from runner.model.figures import bare
from runner.model.layers import StageModule

__all__ = ["Finding", "Watcher", "first_over", "replayed"]

_MESSAGE_BYTES = 1024
_FORWARD, _LOSS, _BACKWARD = range(3)
_AFTER_ALL_MICROBATCHES = 1 << 62
_OF_NOTHING = " (a mean over nothing that counts is NaN, where (sum, weight) is not)"


@dataclass(frozen=True, order=True)
class Finding:
    """A place where a value was not finite; the smallest finding came first.

    Args:
        microbatch: number over all replicas.
        phase: forward, loss or backward, as a number.
        depth: position within the phase.
        what: description of the place, in words.
    """

    microbatch: int
    phase: int
    depth: int
    what: str = field(compare=False)


class Watcher:
    """Checks one rank's layers while a window runs again.

    Args:
        stages: this rank's stages by number.
        gradients: all gradients of the rank.
        number: returns the global number of the micro-batch that runs now.
    """

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        gradients: Sequence[StageGradients],
        number: Callable[[], int],
    ) -> None:
        self._stages = stages
        self._gradients = gradients
        self._number = number
        self._found: Finding | None = None

    @property
    def found(self) -> Finding | None:
        """The first finding so far, if any."""
        return self._found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the context, check every layer's output, its gradient, and every weight's gradient with hooks."""
        with ExitStack() as stack:
            for stage, module in self._stages.items():
                for offset, layer in enumerate(module.layers):
                    index, name = module.first_layer + offset, module.layer_names[offset]
                    place = f"layer {index}{f' ({name})' if name not in ('', str(index)) else ''} on stage {stage}"
                    stack.callback(layer.register_forward_hook(self._forward_hook(index, place)).remove)
                    self._watch_weights(index, layer, stage, stack)
            yield

    def check_loss(self, loss: LossFunction) -> LossFunction:
        """Return ``loss`` with a check of its result."""

        def checked(output: Any, target: Any) -> Any:
            whole = loss(output, target)
            made = bare(whole)
            if not _all_finite(made):
                given = [name for name, value in (("output", output), ("target", target)) if not _all_finite(value)]
                is_nan = not given and isinstance(made, Tensor) and bool(made.isnan().any())
                self._note(_LOSS, 0, "the loss function" + _whose(given), _OF_NOTHING if is_nan else "")
            return whole

        return checked

    def check_sums(self) -> None:
        """If nothing was found before, check the gradients of weights, summed over micro-batches.

        Not every gradient passes a hook: a split backward computes some itself.
        """
        if self._found is not None:
            return
        for gradients in self._gradients:
            for name, parameter in zip(gradients.names, gradients.parameters, strict=True):
                if self._found is None and parameter.grad is not None and not _all_finite(parameter.grad):
                    what = f"the gradient of {name}, summed over micro-batches"
                    self._found = Finding(_AFTER_ALL_MICROBATCHES, _BACKWARD, 0, what)

    def _forward_hook(self, index: int, name: str) -> Callable[[Any, Any, Any], None]:
        def hook(layer: torch.nn.Module, inputs: Any, output: Any) -> None:
            if not _all_finite(output):
                given = [
                    what
                    for what, value in (("input", inputs), ("weights", tuple(layer.parameters())))
                    if not _all_finite(value)
                ]
                self._note(_FORWARD, index, f"the output of {name}" + _whose(given))
            for tensor in flatten(output)[0]:
                if tensor.requires_grad:
                    what = f"the gradient of the output of {name}"
                    tensor.register_hook(self._gradient_hook(-2 * index, what))  # type: ignore[no-untyped-call]

        return hook

    def _watch_weights(self, index: int, layer: torch.nn.Module, stage: int, stack: ExitStack) -> None:
        names = {p: name for g in self._gradients for p, name in zip(g.parameters, g.names, strict=True)}
        for parameter in layer.parameters():
            if parameter in names:
                what = f"the gradient of {names[parameter]} on stage {stage}"
                look = self._gradient_hook(1 - 2 * index, what)
                register: Any = parameter.register_post_accumulate_grad_hook
                stack.callback(register(lambda p, look=look: look(p.grad)).remove)

    def _gradient_hook(self, depth: int, what: str) -> Callable[[Tensor | None], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is not None and not _all_finite(gradient):
                self._note(_BACKWARD, depth, what)

        return hook

    def _note(self, phase: int, depth: int, what: str, hint: str = "") -> None:
        number = self._number()
        finding = Finding(number, phase, depth, f"{what}, micro-batch {number}{hint}")
        if self._found is None or finding < self._found:
            self._found = finding


def first_over(finding: Finding | None, transport: Transport, groups: Sequence[Sequence[int]]) -> Finding | None:
    """The first finding of all ranks, gathered over one group after the other. All their ranks must call it."""
    for group in groups:
        if len(group) > 1:
            parts = transport.all_gather(_packed(finding, transport.device), group)
            found = [one for one in map(_unpacked, parts) if one is not None]
            finding = min(found) if found else None
    return finding


def _packed(finding: Finding | None, device: torch.device) -> Tensor:
    text = b"" if finding is None else json.dumps(asdict(finding)).encode()
    if len(text) > _MESSAGE_BYTES:
        text = json.dumps(asdict(finding) | {"what": "a layer with a very long name"}).encode()  # type: ignore[arg-type]
    return torch.tensor(list(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8, device=device)


def _unpacked(message: Tensor) -> Finding | None:
    text = bytes(message.cpu().tolist()).strip()
    return Finding(**json.loads(text)) if text else None


def _whose(given: Sequence[str]) -> str:
    return f" (of which the {' and the '.join(given)} already had it)" if given else ""


def _all_finite(value: Any) -> bool:
    try:
        tensors = flatten(value)[0]
    except TypeError:  # a target may be any object
        return True
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors if tensor.is_floating_point())


def replayed(window: Window) -> Window:
    """A copy of the window that has not run yet; its loss is known already and is not sent again."""
    return Window(
        step=window.step,
        training=True,
        sizes=window.sizes,
        signature=window.signature,
        inputs=window.inputs,
        targets=window.targets,
        loss_scale=window.loss_scale,
        stand_ins=window.stand_ins,
        is_told=True,
    )
