"""Measures a layer as it runs inside a stage: its backward when other layers follow, and its recomputed forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.live_tracker import LiveTracker
from runner.profile import GradientPeaks, SharedPeaks
from runner.profiling.saved_scan import run_hooked

__all__ = [
    "Run",
    "as_leaf",
    "asking_bytes",
    "backward_peak_bytes",
    "gradient_peaks",
    "handed_peaks",
    "having_gradients",
    "passes_last",
    "shared_peaks",
    "stopped_forward_bytes",
    "whole_backward",
]

Run = Callable[[list[Tensor], list[Tensor], list[Tensor]], Any]
"""Takes the ends of a graph, gradients for them, and the leaves of the input; returns what must stay alive."""


def as_leaf(tensor: Tensor) -> Tensor:
    """The tensor as the next layer receives it when it is measured alone: the same memory, detached from the graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def whole_backward(ends: list[Tensor], gradients: list[Tensor], leaves: list[Tensor]) -> None:
    """B, which adds each gradient to its leaf's own."""
    torch.autograd.backward(ends, gradients)


def backward_peak_bytes(
    run: Run,
    function: Callable[[Any], Any],
    value: Any,
    tracker: LiveTracker,
    *,
    handed: Collection[int] = (),
    keeps_output: bool = False,
    at_its_end: bool = False,
    may_be_less: bool = False,
) -> int:
    """Run ``function`` forward and backward, as if other layers followed it in its stage.

    Args:
        run: the kind of backward.
        function: a layer or loss; the gradients of its weights are allocated already.
        value: its input: tensors in containers.
        tracker: active; its peak is reset.
        handed: positions, among the tensors of the output that require gradients, of those that leave the stage. The
            stage's caller holds them and their gradients; what becomes of the others is up to autograd.
        keeps_output: whether the whole output stays alive, as the second part of a later layer's backward needs it.
        at_its_end: whether no layer follows, so that the whole output leaves the stage.
        may_be_less: whether the peak may be below the bytes that it is above of, because ``run`` resets it.

    Returns:
        its peak bytes above its saved tensors and the gradients of its output.
    """
    given = map_tensors(as_leaf, value)
    outputs, leaves = _with_gradients(function(enter_graph(given))), _with_gradients(given)
    if not outputs:
        return 0
    if at_its_end:
        handed = range(len(outputs))
    ends = [output if at in handed else _later(output) for at, output in enumerate(outputs)]
    gradients = [torch.ones_like(end) for end in ends]
    coming = sum(output.nbytes for at, output in enumerate(outputs) if at not in handed)
    kept = outputs if keeps_output else []
    del outputs
    before = tracker.live + coming
    tracker.reset_peak()
    run(ends, gradients, leaves)
    del kept
    above = tracker.peak - before
    return above if may_be_less else max(0, above)


@contextmanager
def having_gradients(trained: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within the context, parameters have gradients; a run allocates them permanently, so only temporaries count."""
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.grad = None


def gradient_peaks(
    function: Callable[[Any], Any],
    value: Any,
    tracker: LiveTracker,
    trained: Sequence[nn.Parameter],
) -> GradientPeaks:
    """Run ``function`` forward and backward, and take the peaks from its first gradient of a weight on.

    Args:
        function, value, tracker: see :func:`backward_peak_bytes`.
        trained: its trained weights, which no other layer uses.
    """

    def peak(*, keeping: bool, chained: bool) -> int:
        begun = False

        def begin(gradient: Tensor) -> None:
            nonlocal begun
            if not begun:
                tracker.reset_peak()
            begun = True

        with having_gradients(trained):
            for parameter in trained if keeping else ():
                parameter.grad = None
            hooks = [parameter.register_hook(begin) for parameter in trained]  # type: ignore[no-untyped-call]
            found = backward_peak_bytes(
                whole_backward, function, value, tracker, at_its_end=not chained, may_be_less=True
            )
            for hook in hooks:
                hook.remove()
        return found

    adding, chained_adding = (peak(keeping=False, chained=chained) for chained in (False, True))
    keeping, chained_keeping = (peak(keeping=True, chained=chained) for chained in (False, True))
    return GradientPeaks(adding, chained_adding, keeping, chained_keeping)


def handed_peaks(
    run: Run,
    function: Callable[[Any], Any],
    value: Any,
    tracker: LiveTracker,
    own: Mapping[int, int],
    *,
    keeps_output: bool = False,
) -> tuple[tuple[int, int], ...]:
    """:func:`backward_peak_bytes` for each of several tensors of the output, if that one leaves the stage.

    Args:
        own: the positions of the tensors as in ``handed``, each with the place that stands for it in the result.
        run, function, value, tracker, keeps_output: see there.
    """
    return tuple(
        (place, backward_peak_bytes(run, function, value, tracker, handed=(at,), keeps_output=keeps_output))
        for at, place in own.items()
    )


def asking_bytes(
    run: Run, function: Callable[[Any], Any], value: Any, tracker: LiveTracker, *, chained: bool = False
) -> int:
    """Run ``function`` forward and backward; return what the backward has made when it asks for the first saved tensor.

    If the layer is run again in its backward, it runs again then. The bytes are the peak if nothing is asked for.

    Args:
        run, function, value, tracker: see :func:`backward_peak_bytes`.
        chained: whether other layers follow, so that autograd alone holds the output and its gradient.
    """
    given, seen = map_tensors(as_leaf, value), list[int]()

    def note(tensor: Tensor) -> Tensor:
        seen.append(tracker.live)
        return tensor

    output, _ = run_hooked(lambda: function(enter_graph(given)), lambda tensor: tensor.detach(), note)
    outputs, leaves = _with_gradients(output), _with_gradients(given)
    del output
    seen.clear()  # a forward that differentiates within has asked, too
    if not outputs:
        return 0
    coming = sum(output.nbytes for output in outputs) if chained else 0
    if chained:
        outputs = [_later(output) for output in outputs]
    gradients = [torch.ones_like(output) for output in outputs]
    before = tracker.live + coming
    tracker.reset_peak()
    run(outputs, gradients, leaves)
    return max(0, (seen[0] if seen else tracker.peak) - before)


def _with_gradients(value: Any) -> list[Tensor]:
    """The tensors in a nest that require gradients."""
    return [tensor for tensor in flatten(value)[0] if tensor.requires_grad]


def shared_peaks(
    function: Callable[[Any], Any], value: Any, tracker: LiveTracker, shared: Sequence[nn.Parameter]
) -> SharedPeaks:
    """Run ``function`` forward and backward as a layer that shares weights with other layers of its stage.

    Args:
        function, value, tracker: see :func:`backward_peak_bytes`.
        shared: the weights; an earlier layer uses all of them, too.
    """
    return SharedPeaks(
        last=_peak_with_shared(function, value, tracker, shared, chained=True, added=False),
        last_alone=_peak_with_shared(function, value, tracker, shared, chained=False, added=False),
        between=_peak_with_shared(function, value, tracker, shared, chained=True, added=True),
    )


def _peak_with_shared(
    function: Callable[[Any], Any],
    value: Any,
    tracker: LiveTracker,
    shared: Sequence[nn.Parameter],
    *,
    chained: bool,
    added: bool,
) -> int:
    """Peak bytes of a backward above its saved tensors, its output's gradient, and what waits before it begins.

    Autograd runs the nodes that are ready from the last one made to the first. So the uses of the weights before and
    after the layer need no tensor in common with it.

    Args:
        function, value, tracker, shared: see :func:`shared_peaks`.
        chained: whether another layer follows in the stage.
        added: whether a later layer uses the weights, too, whose gradients wait.
    """
    earlier = _use(shared, makes=False)
    roots = [each for each in flatten(function(enter_graph(map_tensors(as_leaf, value))))[0] if each.requires_grad]
    gradient_bytes = sum(root.numel() * root.element_size() for root in roots)
    ends = [_later(root) for root in roots] if chained else roots
    if chained:
        del roots
    uses = [earlier, _use(shared, makes=True)] if added else [earlier]
    before = tracker.live
    gradients = [torch.empty_like(end) for end in ends]
    before += gradient_bytes + (sum(weight.numel() * weight.element_size() for weight in shared) if added else 0)
    tracker.reset_peak()
    torch.autograd.backward([*ends, *uses], [*gradients, *map(torch.empty_like, uses)])
    return max(0, tracker.peak - before)


def passes_last(function: Callable[[Any], Any], value: Any, tracker: LiveTracker) -> bool:
    """Whether a backward makes nothing more once the gradient of a tensor is complete that the layer passes on.

    Args:
        function, value, tracker: see :func:`backward_peak_bytes`.
    """
    given = map_tensors(as_leaf, value)
    roots = [tensor for tensor in flatten(function(enter_graph(given)))[0] if tensor.requires_grad]
    leaving = {root.untyped_storage() for root in roots}
    leaves = [tensor for tensor in flatten(given)[0] if tensor.requires_grad]
    passed = [leaf for leaf in leaves if leaf.untyped_storage() in leaving]
    complete: list[int] = []

    def note(gradient: Tensor) -> None:
        if not complete:
            complete.append(tracker.live)
            tracker.reset_peak()

    for leaf in passed:
        leaf.register_hook(note)  # type: ignore[no-untyped-call]
    if passed:
        torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
    return bool(complete) and tracker.peak <= complete[0]


def stopped_forward_bytes(function: Callable[[Any], Any], value: Any, tracker: LiveTracker) -> int:
    """Run ``function`` forward; return its peak bytes until autograd has saved the last tensor.

    The peak counts from what was alive before the call.

    Args:
        function, value, tracker: see :func:`backward_peak_bytes`.
    """
    before, seen = tracker.live, 0
    tracker.reset_peak()

    def note(tensor: Tensor) -> Tensor:
        nonlocal seen
        seen = tracker.peak - before
        return tensor.detach()

    _, hooked = run_hooked(lambda: function(enter_graph(map_tensors(as_leaf, value))), note, lambda tensor: tensor)
    return seen if hooked else tracker.peak - before


class _Later(torch.autograd.Function):
    """Takes the place of the layers that follow: saves nothing, and makes a gradient that only autograd holds."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = {"size": output.shape, "dtype": output.dtype, "device": output.device}
        return output.new_empty(0)

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> Tensor:
        return torch.ones(**ctx.like)


class _Use(torch.autograd.Function):
    """Takes the place of another layer that uses weights."""

    @staticmethod
    def forward(ctx: Any, makes: bool, *weights: Tensor) -> Tensor:
        ctx.like = [{"size": each.shape, "dtype": each.dtype, "device": each.device} for each in weights]
        ctx.makes = makes
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(torch.empty(**like) if ctx.makes else None for like in ctx.like))


def _use(weights: Sequence[Tensor], *, makes: bool) -> Tensor:
    """The end of a layer that uses weights, and makes gradients of them or only lets them wait for it."""
    end: Tensor = _Use.apply(makes, *weights)  # type: ignore[no-untyped-call, unused-ignore]  # torch's own
    return end


def _later(output: Tensor) -> Tensor:
    """What stands for the end of the layers that follow an output; a backward begins there."""
    end: Tensor = _Later.apply(output)  # type: ignore[no-untyped-call, unused-ignore]  # torch's own
    return end
