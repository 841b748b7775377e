"""One layer's row: what a plan needs to know about it, as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = [
    "BoundaryTensor",
    "Exchange",
    "FillProfile",
    "GradientPeaks",
    "LayerMoves",
    "LayerProfile",
    "Pairs",
    "Recomputation",
    "SharedGradient",
    "SplitBackward",
]

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The cost of a layer whose saved tensors are dropped after its forward and computed again in its backward.

    Args:
        kept_bytes: outputs of operators that are kept nevertheless, without the layer's own output.
        recomputed_bytes: what autograd saves in the second forward besides those; the layer's output only if saved.
        recomputed_flops: FLOPs of the second forward.
        released_bytes: the part of ``kept_bytes`` that is no longer needed after the second forward has used it.
        keeps_output: whether the layer's own output is kept.
        second_peak_bytes: peak of the whole second forward with its graph, above ``kept_bytes``; None = not known, or
            none is possible, as the first forward changes what is kept in place.
        changes_kept: whether the first forward changes an output that is kept in place, so that none is possible.
        unread: storages of the layer's input that the second forward does not read, because only operators whose
            outputs are kept use them.
    """

    kept_bytes: int
    recomputed_bytes: int
    recomputed_flops: float
    released_bytes: int = 0
    keeps_output: bool = False
    second_peak_bytes: int | None = None
    changes_kept: bool = False
    unread: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """The bytes of a layer whose backward is split into I, the gradient of its input, and W, those of its weights.

    Args:
        deferred_bytes: what I leaves to W, without the layer's input and the gradient of its output.
        input_bytes, gradient_bytes: what W needs of the layer's input, and of the gradient of its output.
        transient_bytes: peak while I runs above (saved + the gradient of its output), like that of a backward.
        kept_share: the part of the whole backward that makes gradients of weights and cannot wait for W; by FLOPs or,
            where the layer was timed, by seconds. 0 for a layer whose input requires no gradient: nothing waits for it.
        kept: names of the weights whose gradients with two or more axes cannot wait, each with the reason.
        kept_in_one_piece: whether some are made together with the gradient of the input even if only that is asked for;
            the share is then what I takes beyond half of the backward.
        waiting_bytes: the gradients of weights that I makes, of biases and norms above all. They are added to the
            weights' own when the whole stage's I has ended, and are alive until then.
        chained_transient_bytes: like ``transient_bytes``, for a layer that another one follows in its stage, whose W
            may need this layer's output; None = not known, ``transient_bytes`` is used.
        held_bytes: the part of ``deferred_bytes`` that the stage's caller holds while I runs, as it is the stage's
            output. A measured profile has none; :func:`runner.memory.solve.adjust.adjusted` writes it.
        made_bytes: the largest increase during W over what was alive at its start: of a weight that is used several
            times, the sum and one part. 0 = not known, the gradient of the largest parameter is used.
    """

    deferred_bytes: int
    input_bytes: int
    gradient_bytes: int
    transient_bytes: int
    kept_share: float = 0.0
    kept: tuple[tuple[str, str], ...] = ()
    kept_in_one_piece: bool = False
    waiting_bytes: int = 0
    chained_transient_bytes: int | None = None
    held_bytes: int = 0
    made_bytes: int = 0

    @property
    def inner_bytes(self) -> int:
        """Peak of I if another layer of its stage follows."""
        known = self.chained_transient_bytes
        return self.transient_bytes if known is None else known

    def with_more(self, num_bytes: int) -> SplitBackward:
        """A copy with so many bytes more that are alive while I runs."""
        chained = self.chained_transient_bytes
        return replace(
            self,
            transient_bytes=self.transient_bytes + num_bytes,
            chained_transient_bytes=None if chained is None else chained + num_bytes,
        )

    def with_kept_share(self, backward: float, of_input: float, alone: float) -> SplitBackward:
        """With a share that follows from FLOPs or seconds.

        Args:
            backward: what the whole backward takes; I of a short layer may take longer, and is the whole then.
            of_input: what I takes.
            alone: what the gradient of the input takes if no other is asked for.
        """
        whole = max(backward, of_input)
        beyond = max(of_input - alone, of_input - whole / 2 if self.kept_in_one_piece else 0.0, 0.0)
        return replace(self, kept_share=beyond / whole if whole else 0.0)


@dataclass(frozen=True, slots=True)
class GradientPeaks:
    """Peaks of a layer's backward from the moment on at which it makes the first gradient of a weight of its own.

    They are above saved tensors and the gradient of the output, like those of the whole backward.

    Args:
        adding, chained_adding: if gradients are there, to which it adds those that it makes; the second one for a layer
            that another one follows in its stage.
        keeping, chained_keeping: if none are there, so that it keeps those that it makes, and they count.
    """

    adding: int
    chained_adding: int
    keeping: int
    chained_keeping: int


@dataclass(frozen=True, slots=True)
class BoundaryTensor:
    """Memory in a layer's output. Memory that the layer only carries through keeps its number.

    Args:
        storage: a number, the same in every layer's output that has this memory.
        num_bytes: its bytes; 0 if it is not an activation: the batch, a weight, a constant.
        gradient_bytes: bytes of its gradient; 0 if it has none.
    """

    storage: int
    num_bytes: int
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SharedGradient:
    """Memory that gradients of a layer's input share; it is alive as long as one of them is.

    Args:
        storages: storages of the tensors of the input whose gradients lie in it.
        num_bytes: its bytes.
    """

    storages: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FillProfile:
    """One piece of a layer's work that fills bubbles; a layer may have several of one kind.

    Args:
        kind: its kind's name in the schedule, see :class:`runner.schedule.fills.FillKind`.
        of_microbatch: whether it is done for each micro-batch, and grows with its samples; otherwise once.
        rows: rows that one micro-batch gives it: samples, or tokens.
        size: rows and columns of what it works on.
        flops: FLOPs of one fill.
        kept_bytes: what one micro-batch leaves to it, from the end of the backward; what several layers share counts
            once.
        peak_bytes: most temporaries while it runs.
        seconds: seconds of one fill, on the machine that is planned for.
    """

    kind: str
    of_microbatch: bool
    rows: int
    size: int
    flops: float
    kept_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tensors of one size that the ranks which divide a layer exchange while it runs.

    Args:
        kind: ``all_reduce``, ``all_reduce_max``, ``all_gather`` or ``reduce_scatter``.
        num_bytes: bytes of one tensor; of a gathering or a maximum, which gathers all, those of the whole.
        count: how many there are in a pass.
    """

    kind: str
    num_bytes: int
    count: int = 1

    def sent_bytes(self, ranks: int) -> float:
        """The bytes that each of the ranks sends, in a ring: an all-reduce sends all parts but one twice."""
        return (2 if self.kind == "all_reduce" else 1) * (ranks - 1) / ranks * self.num_bytes * self.count


@dataclass(frozen=True, slots=True)
class LayerMoves:
    """What a layer moves to the host's memory after its forward, and what it needs of what earlier layers have moved.

    Other layers of its stage are given by their distance: that of the layer before is 1.

    Args:
        num_bytes: what is copied to the host, and back for the backward.
        freed_bytes: the part of it that nothing else holds on the device meanwhile.
        sent_after: how many more layers, those of its segment, run forward before its tensors are sent.
        needs: distances of the layers whose moved tensors its backward reads; 0 is the layer itself.
        entering: distances of earlier layers, each with the bytes that it has moved and that this layer's forward is
            given nevertheless.
        one_by_one: whether its tensors are sent only when all that was sent before has left, and come back only when
            all that came back before has been used.
        asking_bytes: what is there beside its output's gradient when its backward asks for the first of these tensors:
            what it has made from its output, which has stayed, and weights that have come from the host.
    """

    num_bytes: int = 0
    freed_bytes: int = 0
    sent_after: int = 0
    needs: tuple[int, ...] = ()
    entering: tuple[tuple[int, int], ...] = ()
    one_by_one: bool = False
    asking_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer's cost for one micro-batch of :attr:`ModelProfile.samples` samples. Sizes are bytes.

    Args:
        name: the layer's name in the model.
        num_parameters: elements of its parameters.
        weight_bytes: its parameters and buffers.
        gradient_bytes: gradients of its trainable parameters.
        saved_bytes: what autograd keeps after its forward, including its output, without its input.
        output_bytes: its output.
        forward_transient_bytes: peak during its forward above that steady state.
        backward_transient_bytes: peak during its backward above (saved + the gradient of its output); includes the
            gradient of its input.
        forward_flops, backward_flops: floating-point operations.
        forward_seconds, backward_seconds: seconds on the machine that is planned for.
        largest_parameter_bytes: gradient of its largest trainable parameter; 0 = not known, gradient_bytes is used.
        saves_input, saves_output: whether autograd keeps its input, and its output; True if not known.
        unsaved_forward_bytes: peak of a forward that saves nothing, including its output; None = not known, that of
            the ordinary forward is used.
        recomputation: figures by the name of what is kept; ``""`` = nothing. Empty = not known, all is recomputed.
        split: its backward in two parts; None = not known, W is assumed to need all that B needs.
        output: the memory of its output, each once. Empty = not known, one tensor that is not carried on is assumed.
        saves: storages of its input and its output that autograd keeps; only with ``output``.
        reads: storages of its input that its operators use, others it only passes on; None = not known, all.
        writes: storages of its input that its forward changes in place.
        writes_shared: whether several tensors of its input lie in one of these.
        repeats: whether it gives the same output and gradients when it is run again with the same random numbers.
        shared_gradients: gradients of its input that are parts of a larger tensor, as after a concatenation.
        output_gradient_bytes: gradient of its output; None = not known, ``output_bytes`` is used.
        chained_backward_bytes: like ``backward_transient_bytes``, for a layer that another one follows in its stage:
            autograd frees the gradient of the output once it is used. None = not known, that value is used.
        gradient_peaks: peaks of its backward once it makes gradients; None = not known.
        asking_bytes: what its backward makes before it asks for the first tensor that autograd has saved, with the
            gradients of weights that it keeps.
        held_output_bytes: the part of its output that its ``saved_bytes`` counts; None = all.
        pending_output_bytes: the part of its output that a later layer's ``saved_bytes`` counts.
        input_gradient_seconds, weight_gradient_seconds: seconds of I and W; None = not known, half a backward each.
        statistics_bytes: running averages of its inputs, like a batch norm's, and their counters.
        fills: its work that may fill bubbles, if the optimizer has such work.
        optimizer_bytes: states of its trainable parameters, including masters and averages; None = use the profile's
            ``optimizer_bytes_per_gradient_byte``.
        trained_shapes: the shapes of its trainable parameters; empty = not known.
        unreached: the places, among ``trained_shapes``, of parameters that no gradient reaches in any step of a run.
        elsewhere_bytes: the gradient of the largest matrix among them that ranks divide, without this rank's part.
        moves: what is moved to the host's memory and back. A measured profile has none;
            :func:`runner.memory.solve.adjust.adjusted` writes it.
        copied_bytes: the part of ``saved_bytes`` that is copies of running statistics, from which layers run again;
            they stay on the rank that has run the forward. A measured profile has none.
        home_weight_bytes, home_gradient_bytes, home_optimizer_bytes: weights that are at home in the host's memory,
            with their gradients and states; what they take on the device while they are used is in other figures.
            A measured profile has none; :func:`runner.plan.weights.with_units` writes it.
        fetched_bytes: the most such weights and gradients, of any layer, that are on the device in its backward.
        forward_exchanges, backward_exchanges: what the ranks that divide it exchange in a forward, and in a backward.
        draws_apart: whether each of these ranks draws random numbers of its own in it, for its part.
    """

    name: str
    num_parameters: int
    weight_bytes: int
    gradient_bytes: int
    saved_bytes: int
    output_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int
    forward_flops: float
    backward_flops: float
    forward_seconds: float
    backward_seconds: float
    largest_parameter_bytes: int = 0
    saves_input: bool = True
    saves_output: bool = True
    unsaved_forward_bytes: int | None = None
    recomputation: Mapping[str, Recomputation] = field(default_factory=dict)
    split: SplitBackward | None = None
    output: tuple[BoundaryTensor, ...] = ()
    saves: tuple[int, ...] = ()
    reads: tuple[int, ...] | None = None
    writes: tuple[int, ...] = ()
    writes_shared: bool = False
    repeats: bool = True
    shared_gradients: tuple[SharedGradient, ...] = ()
    output_gradient_bytes: int | None = None
    chained_backward_bytes: int | None = None
    gradient_peaks: GradientPeaks | None = None
    asking_bytes: int = 0
    statistics_bytes: int = 0
    held_output_bytes: int | None = None
    pending_output_bytes: int = 0
    input_gradient_seconds: float | None = None
    weight_gradient_seconds: float | None = None
    optimizer_bytes: int | None = None
    fills: tuple[FillProfile, ...] = ()
    trained_shapes: tuple[tuple[int, ...], ...] = ()
    unreached: tuple[int, ...] = ()
    elsewhere_bytes: int = 0
    moves: LayerMoves = LayerMoves()
    copied_bytes: int = 0
    home_weight_bytes: int = 0
    home_gradient_bytes: int = 0
    home_optimizer_bytes: int = 0
    fetched_bytes: int = 0
    forward_exchanges: tuple[Exchange, ...] = ()
    backward_exchanges: tuple[Exchange, ...] = ()
    draws_apart: bool = False

    @property
    def moved_bytes(self) -> int:
        """Bytes that are moved to the host's memory after its forward, and back for its backward."""
        return self.moves.num_bytes

    @property
    def num_trained(self) -> int:
        """Elements of its trainable parameters; all, or none, by its gradients if their shapes are not known."""
        if self.trained_shapes:
            return sum(map(math.prod, self.trained_shapes))
        return self.num_parameters if self.gradient_bytes else 0

    @property
    def unreached_bytes(self) -> int:
        """Gradients, which are zero, of its trainable parameters that no gradient reaches."""
        elements = sum(math.prod(self.trained_shapes[at]) for at in self.unreached)
        return elements * self.gradient_bytes // self.num_trained if elements else 0

    @property
    def has_running_statistics(self) -> bool:
        """Whether it keeps averages of its inputs, like a batch norm."""
        return self.statistics_bytes > 0

    @property
    def split_seconds(self) -> tuple[float, float]:
        """Seconds of I and of W; where they are not known, weights take half of a backward."""
        in_w = max(0.0, 0.5 - (self.split.kept_share if self.split is not None else 0.0)) * self.backward_seconds
        known = self.input_gradient_seconds, self.weight_gradient_seconds
        return self.backward_seconds - in_w if known[0] is None else known[0], in_w if known[1] is None else known[1]

    @property
    def gradient_of_output_bytes(self) -> int:
        """Bytes of the gradient of its output, or the largest possible value if not known."""
        return self.output_bytes if self.output_gradient_bytes is None else self.output_gradient_bytes

    def with_backward(self, alone: int, chained: int | None = None) -> LayerProfile:
        """The row with another backward, of which only these peaks are known; others are then taken from them.

        Args:
            alone, chained: see ``backward_transient_bytes`` and ``chained_backward_bytes``.
        """
        return replace(self, backward_transient_bytes=alone, chained_backward_bytes=chained, gradient_peaks=None)

    def gradient_peak_bytes(self, *, chained: bool, keeping: bool) -> int:
        """Peak of its backward from its first gradient of a weight on, or a bound if that is not known.

        Args:
            chained: whether another layer of its stage follows.
            keeping: whether there are no gradients yet, so that those that it makes stay and count.
        """
        known = self.gradient_peaks
        if known is None:
            whole = self.inner_backward_bytes if chained else self.backward_transient_bytes
            return whole + (self.gradient_bytes if keeping else 0)
        if keeping:
            return known.chained_keeping if chained else known.keeping
        return known.chained_adding if chained else known.adding

    @property
    def inner_backward_bytes(self) -> int:
        """Peak of its backward if another layer of its stage follows."""
        known = self.chained_backward_bytes
        return self.backward_transient_bytes if known is None else known
