"""Measures a layer as it runs inside a stage: its backward when other layers follow, and its recomputed forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, autograd, nn

from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.live_tracker import LiveTracker
from runner.profiling.saved_scan import run_hooked

__all__ = [
    "BackwardPeaks",
    "BackwardWatch",
    "as_leaf",
    "chained_backward",
    "having_gradients",
]

T = TypeVar("T")

Run = Callable[[list[Tensor], list[Tensor], list[Tensor]], Any]
"""Takes the ends of a graph, gradients for them, and the leaves of the input; returns what must stay alive."""


def as_leaf(tensor: Tensor) -> Tensor:
    """The tensor as the next layer receives it when it is measured alone: the same memory, detached from the graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


class BackwardPeaks(NamedTuple):
    """Bytes of a backward, above its saved tensors and the gradients of its output.

    Args:
        peak: the most bytes, if the gradients of the watched weights are added to others that are there already.
        asking: what it has made when it asks for the first saved tensor, as a layer that is run again in its backward
            runs again then, with gradients that it keeps. It is the peak if it asks for none.
        adding: like ``peak``, from the first gradient of a watched weight on; the peak if there is none.
        keeping: like ``adding``, if no gradients are there, so that those that the backward makes stay and count.
    """

    peak: int
    asking: int
    adding: int
    keeping: int


class BackwardWatch:
    """Watches a forward and its backward, which finds no gradients of the watched weights and keeps those it makes.

    Args:
        tracker: active; its peak is reset when the backward begins.
        trained: the watched weights; their gradients are dropped in the end.

    Attributes:
        unreached: the places, among these weights, of those of which the backward has made no gradient.
    """

    def __init__(self, tracker: LiveTracker, trained: Sequence[nn.Parameter] = ()) -> None:
        self._tracker, self._trained = tracker, trained
        self.unreached: tuple[int, ...] = ()
        self._asked: int | None = None
        self._complete: dict[int, tuple[int, int]] = {}  # by weight, the storage of its gradient, and its bytes
        self._kept = 0  # bytes of the gradients that are complete
        self._peak = 0  # without those
        self._from_first: tuple[int, int] | None = None  # without and with those, from the first gradient on

    def forward(self, run: Callable[[], T]) -> tuple[T, bool]:
        """Run a forward so that it is seen when its backward asks for what is saved, see :func:`run_hooked`."""

        def pack(tensor: Tensor) -> Tensor:
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
        hooks += [weight.register_post_accumulate_grad_hook(self._keep) for weight in self._trained]  # type: ignore[no-untyped-call]
        stays = run()
        self._note()
        del stays
        for hook in hooks:
            hook.remove()
        self.unreached = tuple(at for at, weight in enumerate(self._trained) if weight.grad is None)
        for weight in self._trained:
            weight.grad = None
        adding, keeping = self._from_first or (self._peak, self._peak)
        asked = max(self._peak, keeping) if self._asked is None else self._asked
        return BackwardPeaks(max(0, self._peak - before), max(0, asked - before), adding - before, keeping - before)

    def _ask(self, tensor: Tensor) -> Tensor:
        if self._asked is None:
            self._asked = self._tracker.live
        return tensor

    def _note(self, *, alone: bool = True) -> None:
        """Note the peak since it was noted before; ``alone``: also as one without the gradients that are complete."""
        peak = self._tracker.peak
        self._tracker.reset_peak()
        if alone:
            self._peak = max(self._peak, peak - self._kept)
        if self._from_first is not None:
            adding, keeping = self._from_first
            self._from_first = max(adding, peak - self._kept) if alone else adding, max(keeping, peak)

    def _begin(self, gradient: Tensor) -> None:
        """A gradient is made. Where another one is there, it is added to that in place, else it may be copied."""
        self._note()
        if self._from_first is None:
            live = self._tracker.live
            self._from_first = live - self._kept, live

    def _keep(self, weight: Tensor) -> None:
        """A gradient is complete, or was added to. The memory of one that is a part of a larger tensor counts on."""
        self._note(alone=False)
        gradient = weight.grad
        if gradient is not None and gradient.layout is torch.strided:
            storage = gradient.untyped_storage()
            whole = storage.nbytes()
            self._complete[id(weight)] = storage._cdata, whole if whole == gradient.nbytes else 0
            self._kept = sum(dict(self._complete.values()).values())  # gradients of two weights may share memory


def chained_backward(
    function: Callable[[Any], Any],
    value: Any,
    tracker: LiveTracker,
    trained: Sequence[nn.Parameter] = (),
    of_input: Run | None = None,
) -> BackwardPeaks:
    """Run ``function`` forward and backward, as if other layers followed it in its stage.

    Args:
        function: a layer or loss.
        value: its input: tensors in containers.
        tracker: active; its peak is reset.
        trained: its weights that have no gradients, see :class:`BackwardWatch`.
        of_input: the first part of a backward in two parts. The output then stays alive, as the second part of a later
            layer's backward may need it. None: the whole backward.
    """
    given, watch = map_tensors(as_leaf, value), BackwardWatch(tracker, trained)

    def forward() -> Any:
        return function(enter_graph(given))

    output = watch.forward(forward)[0] if of_input is None else forward()
    outputs, leaves = ([each for each in flatten(one)[0] if each.requires_grad] for one in (output, given))
    if not outputs:
        return BackwardPeaks(0, 0, 0, 0)
    ends, coming = [_later(each) for each in outputs], sum(each.nbytes for each in outputs)
    gradients = [torch.ones_like(end) for end in ends]
    del outputs
    if of_input is not None:
        return watch.backward(lambda: of_input(ends, gradients, leaves), tracker.live + coming)
    del output
    return watch.backward(lambda: torch.autograd.backward(ends, gradients), tracker.live + coming)


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


class _Later(torch.autograd.Function):
    """Takes the place of the layers that follow: saves nothing, and makes a gradient that only autograd holds."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = {"size": output.shape, "dtype": output.dtype, "device": output.device}
        return output.new_empty(0)

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> Tensor:
        return torch.ones(**ctx.like)


def _later(output: Tensor) -> Tensor:
    """What stands for the end of the layers that follow an output; a backward begins there."""
    end: Tensor = _Later.apply(output)  # type: ignore[no-untyped-call, unused-ignore]  # torch's own
    return end
