"""Defines a window of the stream, which is the micro-batches of one optimizer step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from runner.model.boundary import Structure, flatten, map_tensors, unflatten

__all__ = ["BoundarySpec", "StepBatch", "Window", "join_microbatches", "split_microbatches", "with_stand_ins"]


@dataclass
class StepBatch:
    """This rank's part of one optimizer step's batch.

    Args:
        inputs: input of the first layer, samples on the first axis; None on a rank without the first stage.
        targets: targets for the loss; None on a rank without the last stage.
        samples: number of samples of this replica; None on a rank that loads no data (it gets it in the header).
        checksum: checksum of inputs and targets, which are the same on all ranks that load them; else None.
        place: the place in the data after this batch, of which the engine knows nothing; None if it is not told.
    """

    inputs: Any = None
    targets: Any = None
    samples: int | None = None
    checksum: int | None = None
    place: Any = None

    def __getitem__(self, key: object) -> NoReturn:
        """Tell a user's hook that unpacks its batch where things are; an ``__iter__`` would make this a collection."""
        where = "batch.inputs on ranks of the first stage, batch.targets on those of the last, None on others"
        raise TypeError(f"the batch of a hook is this rank's part of a step, and no pair: it has {where}")


@dataclass
class Window:
    """One optimizer step that has begun on one rank.

    Args:
        step: index of the optimizer step.
        training: whether it is of training; False for a forward-only window.
        sizes: number of samples of each micro-batch.
        signature: a number for the input's shapes and dtypes; the first stage numbers them in order of appearance.
        inputs, targets: one entry per micro-batch, on the ranks that load them.
        loss: float64 ``[sum, weight]`` of the loss over the micro-batches, on the last stage and, after STEP,
            everywhere.
        asks: what ranks ask for after this step, as far as this rank knows; see :mod:`runner.engine.asks`.
        loss_scale: factor by which the loss is multiplied before its backward.
        own_losses: micro-batches whose loss this rank computes.
        losses_to_come: number of those with samples whose loss is not in ``loss`` yet.
        knows_totals: whether ``loss`` and ``asks`` are those of all ranks.
        is_told: whether the loss need not be sent: the other ranks know it, or must not get it.
        waits_for_step: this rank's stages whose optimizer step has not come yet.
        stand_ins: micro-batches without samples that are computed nevertheless, on one sample whose loss does not
            count, because replicas that shard gradients must all take part in each micro-batch.
        first: the number of its first micro-batch in actions. Several windows may run at the same time, and all their
            micro-batches have different numbers in actions; elsewhere in the window micro-batches count from 0.
        outputs: outputs of the last layer by micro-batch, on the last stage of a forward-only window without targets.
        metrics: float64, a row ``[sum, weight]`` for each sum of the metrics of a validation window, and of the figures
            beside the loss of a training window; known where ``loss`` is.
    """

    step: int
    training: bool
    sizes: tuple[int, ...]
    signature: int
    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    loss: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    asks: int = 0
    loss_scale: float = 1.0
    own_losses: Sequence[int] = ()
    losses_to_come: int = 0
    knows_totals: bool = False
    is_told: bool = False
    waits_for_step: set[int] = field(default_factory=set)
    stand_ins: frozenset[int] = frozenset()
    first: int = 0
    outputs: dict[int, Any] = field(default_factory=dict)
    metrics: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.float64))

    def __post_init__(self) -> None:
        self.losses_to_come = sum(self.sizes[number] > 0 for number in self.own_losses)

    def begin_again(self, loss_scale: float) -> None:
        """Reset the losses; what ranks ask for is kept."""
        self.loss.zero_()
        self.metrics.zero_()
        self.loss_scale = loss_scale
        self.__post_init__()

    def totals(self) -> Tensor:
        """``[sum, weight, asks]``, and after it the sums and weights of metrics, as one tensor."""
        return torch.cat([self.loss, torch.tensor([float(self.asks)], dtype=torch.float64), self.metrics.flatten()])

    @staticmethod
    def forget_figures(totals: Tensor) -> None:
        """Set all but the asks of :meth:`totals` to zero, where another rank tells the same figures."""
        asks = totals[2].clone()
        totals.zero_()
        totals[2] = asks

    def learn(self, totals: Tensor) -> None:
        """Set the loss, the asks and the metrics from the sum of all ranks' :meth:`totals`."""
        self.loss.copy_(totals[:2])
        self.asks = round(float(totals[2]))
        self.metrics.copy_(totals[3:].view_as(self.metrics))
        self.knows_totals = True

    @property
    def computed(self) -> frozenset[int]:
        """The micro-batches that are computed; the others have no samples."""
        return frozenset(number for number, size in enumerate(self.sizes) if size)

    @property
    def numbers(self) -> range:
        """The numbers of its micro-batches in actions."""
        return range(self.first, self.first + len(self.sizes))

    def index(self, number: int) -> int:
        """The index, from 0, of the micro-batch that has ``number`` in actions."""
        return number - self.first

    def size(self, number: int) -> int:
        """The number of samples of the micro-batch that has ``number`` in actions."""
        return self.sizes[number - self.first]

    def key(self, number: int) -> tuple[bool, int, int]:
        """The key on which a boundary's shapes depend, for the micro-batch that has ``number`` in actions."""
        return self.training, self.signature, self.size(number)


class TensorSpec(NamedTuple):
    """What the receiver of a tensor must know before.

    Args:
        shape, dtype, requires_grad: the tensor's own.
        axes: its axes in the order in which they lie in memory, outermost first. Sums over a tensor depend on it in
            their last bits. Memory with gaps is closed up.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    axes: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, _axes_in_memory(tensor))

    def describes(self, tensor: Tensor) -> bool:
        """Whether a tensor has this shape; its memory may have another order."""
        return (tensor.shape, tensor.dtype, tensor.requires_grad) == self[:3]

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}{'' if self.requires_grad else ', no gradient'}"

    def allocate(self, device: torch.device) -> Tensor:
        """An empty tensor."""
        return torch.empty_permuted(self.shape, self.axes, dtype=self.dtype, device=device)  # no view, whose base stays

    def in_memory(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor in the order of ``axes``, contiguous: what a message consists of."""
        return tensor.permute(self.axes).contiguous().resolve_conj().resolve_neg()


def _axes_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """The axes by descending stride; in their own order if the tensor is contiguous, or a part of other memory."""
    own = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return own
    axes = tuple(sorted(own, key=tensor.stride, reverse=True))
    return axes if tensor.permute(axes).is_contiguous() else own


@dataclass(frozen=True)
class BoundarySpec:
    """The shapes of the values that cross a boundary; they are announced once and then known to both ends.

    Args:
        structure: the structure that the tensors are put into.
        tensors: one entry for each.
    """

    structure: Structure
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def _text(self) -> str:
        """The structure as text, in which True is not 1, and a number that is none is itself."""
        return json.dumps(self.structure)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], structure: Structure) -> BoundarySpec:
        """Describe a boundary whose tensors are listed in order."""
        return cls(structure, tuple(map(TensorSpec.of, tensors)))

    def describes(self, tensors: Sequence[Tensor], structure: Structure) -> bool:
        """Whether a boundary whose tensors are listed has these shapes; it builds no second description."""
        return (
            len(tensors) == len(self.tensors)
            and all(spec.describes(tensor) for tensor, spec in zip(tensors, self.tensors, strict=True))
            and json.dumps(structure) == self._text
        )

    def __str__(self) -> str:
        return f"[{'; '.join(map(str, self.tensors))}] in {self._text}"

    def to_bytes(self) -> bytes:
        tensors = [(s.shape, str(s.dtype).removeprefix("torch."), s.requires_grad, s.axes) for s in self.tensors]
        return json.dumps([self.structure, tensors]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> BoundarySpec:
        structure, tensors = json.loads(data)
        return cls(
            structure,
            tuple(
                TensorSpec(tuple(shape), getattr(torch, dtype), grad, tuple(axes))
                for shape, dtype, grad, axes in tensors
            ),
        )

    def allocate(self, device: torch.device) -> list[Tensor]:
        """Empty tensors of these shapes, for a receive."""
        return [spec.allocate(device) for spec in self.tensors]

    def in_memory(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The messages of the tensors, which share the memory of those whose layout was announced."""
        return [spec.in_memory(tensor) for tensor, spec in zip(tensors, self.tensors, strict=True)]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Build the boundary's value from received tensors, which require gradients if those of the sender do."""
        for tensor, spec in zip(tensors, self.tensors, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        return unflatten(tensors, self.structure)


def split_microbatches(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Parts of every tensor of ``value`` on its first axis, of so many samples each; they may have none."""
    ends = pairwise(accumulate(sizes, initial=0))
    return [map_tensors(lambda t, a=a, b=b: t[a:b], value) for a, b in ends]  # type: ignore[misc]


def with_stand_ins(value: Any, parts: Sequence[Any], numbers: Iterable[int]) -> list[Any]:
    """``parts`` with one sample in each of the given micro-batches: the batch's first one, or zeros without samples."""
    one = map_tensors(lambda t: t[:1] if len(t) else t.new_zeros((1, *t.shape[1:])), value)
    return [one if number in set(numbers) else part for number, part in enumerate(parts)]


def join_microbatches(parts: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches, which have one structure, on their first axis.

    This is the inverse of :func:`split_microbatches`. Tensors without axes, which belong to no sample, are stacked.
    """
    flats = [flatten(part) for part in parts]
    columns = zip(*(tensors for tensors, _ in flats), strict=True)
    return unflatten([torch.cat(c) if c[0].dim() else torch.stack(c) for c in columns], flats[0][1])
