"""Rehearses programs that decide in the run what they keep: one micro-batch on tensors without memory.

Such a program decides by sizes and FLOPs of operators alone, so that it decides on tensors without memory as in the
run. What it takes then is known to the byte, where its rows without a rehearsal are bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError
from runner.memory.apply.evicting import NoRoomError
from runner.memory.apply.install import install
from runner.memory.apply.operators import InPlaceError
from runner.memory.solve.values import StageProgram
from runner.model.apart import ApartError, apart
from runner.model.boundary import enter_graph, flatten, map_tensors, num_samples
from runner.model.data import LossFunction, example_batch
from runner.model.layers import LayerSource, build_stage
from runner.model.live_tracker import LiveTracker
from runner.model.precision import autocast_of, autocasting, cast_module, dtype_of, to_precision
from runner.profile import Rehearsal
from runner.profiling.backward_scan import as_leaf, having_gradients
from runner.profiling.flops import FlopCounter
from runner.profiling.model import checked_loss, faked

__all__ = ["rehearse", "rehearse_stage"]

logger = logging.getLogger(__name__)


def rehearse(config: RunConfig, programs: Iterable[StageProgram], samples: int) -> tuple[Rehearsal, ...]:
    """Rehearse the programs of stages of a request's model; a model that cannot run without memory gives nothing.

    Args:
        config: the request.
        programs: the programs.
        samples: samples of the micro-batch.
    """
    try:
        return apart(_on_fake_tensors, config, tuple(programs), samples)
    except ApartError as error:  # a user's code may do anything that fake tensors cannot
        logger.info("what a policy that decides in the run takes is a bound: it cannot be rehearsed: %s", error)
        return ()


def _on_fake_tensors(config: RunConfig, programs: Iterable[StageProgram], samples: int) -> tuple[Rehearsal, ...]:
    inputs, targets = example_batch(config.data, samples, config.seed)
    dtype, autocast = dtype_of(config.precision.name), autocast_of(config.precision.name)
    with faked(config, inputs, targets, by_values=False) as (model, given, wanted):
        run = partial(rehearse_stage, model.layers, given, wanted, model.loss, dtype=dtype, autocast=autocast)
        try:
            return tuple(map(run, programs))
        except InPlaceError as error:
            name = config.activation_checkpoint.name
            rule, fix = "must not drop what cannot be made again", "activation_checkpoint=rotor"
            raise RequestError([Problem("activation_checkpoint.name", name, rule, str(error), fix)]) from None


def rehearse_stage(
    sources: Sequence[LayerSource],
    inputs: Any,
    targets: Any,
    loss: LossFunction,
    program: StageProgram,
    *,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
) -> Rehearsal:
    """Run one micro-batch through a stage under its program, forward and backward; running statistics change.

    Args:
        sources: the layers of the whole model.
        inputs, targets: the micro-batch, real or fake.
        loss: the loss function.
        program: the stage's program.
        dtype: dtype of weights and, without ``autocast``, activations.
        autocast: format of the matrix products in forwards, or None.
    """
    value = to_precision((inputs, targets) if sources[0].step is not None else inputs, dtype)
    device = next((tensor.device.type for tensor in flatten(inputs)[0]), "cpu")
    if program.first:
        with torch.no_grad():
            value = autocasting(cast_module(build_stage(sources, 0, program.first - 1), dtype), device, autocast)(value)
        value = map_tensors(_with_gradient, value)
    stage = build_stage(sources, program.first, program.last)
    cast_module(stage, dtype)
    install(stage, program)
    lose = partial(checked_loss, loss, targets, num_samples(inputs)) if program.last == len(sources) - 1 else _as_it_is
    run = _Run(lambda given: lose(autocasting(stage, device, autocast)(given)), value, stage)
    try:
        adding, growing = run(keeping=False), run(keeping=True)
    except NoRoomError:
        return Rehearsal(repr(program), runs=False)
    return Rehearsal(
        repr(program), adding.saved, adding.forward, adding.whole, adding.later, growing.later, adding.flops
    )


def _as_it_is(output: Any) -> Any:
    return output


class _Figures(NamedTuple):
    """Bytes and FLOPs of one run; see :class:`runner.profile.Rehearsal`."""

    saved: int
    forward: int
    whole: int
    later: int
    flops: float


class _Run:
    """Runs a stage forward and backward.

    Args:
        function: its forward.
        value: its input.
        stage: its module.
    """

    def __init__(self, function: Callable[[Any], Any], value: Any, stage: nn.Module) -> None:
        self._function, self._value = function, value
        self._trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]

    def __call__(self, *, keeping: bool) -> _Figures:
        """Run it; ``keeping`` says that there are no gradients of weights before, so that those that are made count."""
        with LiveTracker() as tracker, having_gradients(() if keeping else self._trained):
            given = map_tensors(as_leaf, self._value)
            before = tracker.live
            tracker.reset_peak()
            output = self._function(enter_graph(given))
            forward, saved = tracker.peak - before, tracker.live - before
            whole, later, flops = self._backward(output, tracker)
        for parameter in self._trained:
            parameter.grad = None
        return _Figures(saved, forward, whole, later, flops)

    def _backward(self, output: Any, tracker: LiveTracker) -> tuple[int, int, float]:
        """The peak of the whole backward, that from its first gradient of a weight on, and its FLOPs."""
        before_gradients: list[int] = []

        def begin(gradient: Tensor) -> None:
            if not before_gradients:
                before_gradients.append(tracker.peak)
                tracker.reset_peak()

        hooks = [parameter.register_hook(begin) for parameter in self._trained]  # type: ignore[no-untyped-call]
        roots = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
        gradients = [torch.ones_like(root) for root in roots]
        before = tracker.live
        tracker.reset_peak()
        with FlopCounter() as flops:
            torch.autograd.backward(roots, gradients)
        for hook in hooks:
            hook.remove()
        return max(tracker.peak, *before_gradients) - before, tracker.peak - before, flops.total


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
