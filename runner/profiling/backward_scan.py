"""Measures a layer as it runs inside a stage: its backward when other layers follow, and its recomputed forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, autograd, nn

from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.live_tracker import LiveTracker
from runner.profile import SharedPeaks
from runner.profiling.saved_scan import run_hooked

__all__ = [
    "BackwardPeaks",
    "BackwardWatch",
    "Run",
    "as_leaf",
    "handed_peaks",
    "having_gradients",
    "keeping_peaks",
    "passes_last",
    "scan_backward",
    "shared_peaks",
    "whole_backward",
]

T = TypeVar("T")

Run = Callable[[list[Tensor], list[Tensor], list[Tensor]], Any]
"""Takes the ends of a graph, gradients for them, and the leaves of the input; returns what must stay alive."""


def as_leaf(tensor: Tensor) -> Tensor:
    """The tensor as the next layer receives it when it is measured alone: the same memory, detached from the graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def whole_backward(ends: list[Tensor], gradients: list[Tensor], leaves: list[Tensor]) -> None:
    """B, which adds each gradient to its leaf's own."""
    torch.autograd.backward(ends, gradients)


class BackwardPeaks(NamedTuple):
    """Bytes of a backward, above its saved tensors and the gradients of its output.

    Args:
        peak: the most bytes.
        asking: what it has made when it asks for the first saved tensor, as a layer that is run again in its backward
            runs again then. It is the peak if it asks for none, or was not watched.
        later: the most bytes from its first gradient of a watched weight on; the peak if there is none.
        output_is_there: whether memory of the output is there when it begins, although nobody else holds it.
    """

    peak: int
    asking: int
    later: int
    output_is_there: bool = False


class BackwardWatch:
    """Watches a forward and its backward.

    Args:
        tracker: active; its peak is reset when the backward begins.
        trained: the weights whose first gradient is waited for.
    """

    def __init__(self, tracker: LiveTracker, trained: Sequence[nn.Parameter] = ()) -> None:
        self._tracker, self._trained = tracker, trained
        self._asked: int | None = None
        self._until_first: int | None = None  # the peak until the first gradient of a weight

    def forward(self, run: Callable[[], T], saving: Callable[[], None] = lambda: None) -> tuple[T, bool]:
        """Run a forward so that it is seen when its backward asks for what is saved, see :func:`run_hooked`.

        Args:
            run: the forward.
            saving: is called whenever autograd saves a tensor.
        """

        def pack(tensor: Tensor) -> Tensor:
            saving()
            newest = autograd._get_sequence_nr() - 1  # type: ignore[attr-defined, unused-ignore]
            is_result = tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() == newest  # of what saves it
            return tensor.detach() if is_result else tensor  # itself, with which a shared entry of ranks lives as long

        return run_hooked(run, pack, self._ask)

    def backward(self, run: Callable[[], object], before: int) -> BackwardPeaks:
        """Run the backward.

        Args:
            run: the backward; what it returns stays alive until it has ended.
            before: the bytes that the figures are above of.
        """
        self._tracker.reset_peak()
        self._asked = None  # a forward that differentiates within has asked, too
        hooks = [weight.register_hook(self._begin) for weight in self._trained]  # type: ignore[no-untyped-call]
        kept = run()
        later = self._tracker.peak
        del kept
        for hook in hooks:
            hook.remove()
        peak = later if self._until_first is None else max(self._until_first, later)
        asked = peak if self._asked is None else self._asked
        return BackwardPeaks(max(0, peak - before), max(0, asked - before), later - before)

    def _ask(self, tensor: Tensor) -> Tensor:
        if self._asked is None:
            self._asked = self._tracker.live
        return tensor

    def _begin(self, gradient: Tensor) -> None:
        if self._until_first is None:
            self._until_first = self._tracker.peak
            self._tracker.reset_peak()


def scan_backward(
    run: Run,
    function: Callable[[Any], Any],
    value: Any,
    tracker: LiveTracker,
    *,
    handed: Collection[int] = (),
    keeps_output: bool = False,
    at_its_end: bool = False,
    asks: bool = False,
    trained: Sequence[nn.Parameter] = (),
) -> BackwardPeaks:
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
        asks: whether to watch when the backward asks for the first saved tensor.
        trained: the weights whose first gradient is waited for.
    """
    given, watch = map_tensors(as_leaf, value), BackwardWatch(tracker, trained)

    def forward() -> Any:
        return function(enter_graph(given))

    output = watch.forward(forward)[0] if asks else forward()
    outputs, leaves = _with_gradients(output), _with_gradients(given)
    del output
    if not outputs:
        return BackwardPeaks(0, 0, 0)
    if at_its_end:
        handed = range(len(outputs))
    ends = [output if at in handed else _later(output) for at, output in enumerate(outputs)]
    gradients = [torch.ones_like(end) for end in ends]
    coming = sum(output.nbytes for at, output in enumerate(outputs) if at not in handed)
    memories = [weakref.ref(output.untyped_storage()) for output in outputs]
    kept = outputs if keeps_output else []
    del outputs
    is_there = any(memory() is not None for memory in memories)
    found = watch.backward(lambda: run(ends, gradients, leaves), tracker.live + coming)
    del kept
    return found._replace(output_is_there=is_there)


@contextmanager
def having_gradients(trained: Sequence[nn.Parameter]) -> Iterator[Callable[[], list[nn.Parameter]]]:
    """Within the context, parameters have gradients; a run allocates them permanently, so only temporaries count.

    Yields:
        a function that returns the parameters whose gradients nothing in the context has changed so far.
    """
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    given = [(id(parameter.grad), parameter.grad._version) for parameter in trained if parameter.grad is not None]

    def unreached() -> list[nn.Parameter]:
        pairs = zip(trained, given, strict=True)
        return [
            each for each, before in pairs if each.grad is not None and (id(each.grad), each.grad._version) == before
        ]

    try:
        yield unreached
    finally:
        for parameter in trained:
            parameter.grad = None


def keeping_peaks(
    function: Callable[[Any], Any], value: Any, tracker: LiveTracker, trained: Sequence[nn.Parameter]
) -> tuple[int, int]:
    """The peaks, from its first gradient of a weight on, of a backward that finds none; those that it makes are kept.

    Args:
        function, value, tracker: see :func:`scan_backward`.
        trained: its trained weights, which no other layer uses.

    Returns:
        the peak of a layer at its stage's end, and of one that another one follows.
    """
    found = []
    for at_its_end in (True, False):
        peaks = scan_backward(whole_backward, function, value, tracker, at_its_end=at_its_end, trained=trained)
        found.append(peaks.later)
        for weight in trained:
            weight.grad = None
    return found[0], found[1]


def handed_peaks(
    run: Run,
    function: Callable[[Any], Any],
    value: Any,
    tracker: LiveTracker,
    own: Mapping[int, int],
    *,
    keeps_output: bool = False,
) -> tuple[tuple[int, int], ...]:
    """:func:`scan_backward` for each of several tensors of the output, if that one leaves the stage.

    Args:
        own: the positions of the tensors as in ``handed``, each with the place that stands for it in the result.
        run, function, value, tracker, keeps_output: see there.
    """
    return tuple(
        (place, scan_backward(run, function, value, tracker, handed=(at,), keeps_output=keeps_output).peak)
        for at, place in own.items()
    )


def _with_gradients(value: Any) -> list[Tensor]:
    """The tensors in a nest that require gradients."""
    return [tensor for tensor in flatten(value)[0] if tensor.requires_grad]


def shared_peaks(
    function: Callable[[Any], Any], value: Any, tracker: LiveTracker, shared: Sequence[nn.Parameter]
) -> SharedPeaks:
    """Run ``function`` forward and backward as a layer that shares weights with other layers of its stage.

    Args:
        function, value, tracker: see :func:`scan_backward`.
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
        function, value, tracker: see :func:`scan_backward`.
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
