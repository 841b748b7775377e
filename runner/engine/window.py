"""What one window of the stream (one optimizer step's micro-batches) knows of itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.model.boundary import Structure, flatten, map_tensors, unflatten
from runner.plan.layout.batches import split_sizes

__all__ = ["BoundarySpec", "StepBatch", "Window", "join_microbatches", "split_microbatches", "with_stand_ins"]


@dataclass
class StepBatch:
    """This rank's part of one optimizer step's batch.

    Args:
        inputs: what the first layer takes, samples on the first axis; None on a rank without the first stage.
        targets: what the loss takes; None on a rank without the last stage.
        samples: samples of this replica; None on a rank that loads no data (the header tells it).
        checksum: of the inputs, where several ranks load them and could disagree; else None.
    """

    inputs: Any = None
    targets: Any = None
    samples: int | None = None
    checksum: int | None = None


@dataclass
class Window:
    """One step under way on one rank.

    Args:
        step: index of the optimizer step.
        training: False for a forward-only window.
        sizes: samples of each micro-batch.
        signature: number of the input's shape and dtype, counted by the first stage as they appear.
        inputs, targets: one entry per micro-batch, on the ranks that load them.
        loss: float64 ``[sum, weight]`` of the loss over the micro-batches, on the last stage and, after STEP,
            everywhere.
        stops: how many ranks asked to stop after this step, as far as this rank knows.
        loss_scale: what the loss is multiplied by before its backward.
        own_losses: micro-batches whose loss this rank computes.
        losses_to_come: those of them with samples whose loss is not in ``loss`` yet.
        knows_totals: ``loss`` and ``stops`` are those of all ranks.
        is_told: the other ranks know the loss, or shall not be told.
        waits_for_step: this rank's stages whose optimizer step is still to come.
        stand_ins: micro-batches without samples that are computed all the same, on one sample whose loss does not
            count: replicas that share out their gradients must all take part in each.
        first: the number that actions give to its first micro-batch. Several windows may be under way, and no two of
            their micro-batches have one number; everywhere else in the window micro-batches count from 0.
        outputs: the last layer's by micro-batch, on the last stage of a forward-only window without targets.
    """

    step: int
    training: bool
    sizes: tuple[int, ...]
    signature: int
    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    loss: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    stops: int = 0
    loss_scale: float = 1.0
    own_losses: Sequence[int] = ()
    losses_to_come: int = 0
    knows_totals: bool = False
    is_told: bool = False
    waits_for_step: set[int] = field(default_factory=set)
    stand_ins: frozenset[int] = frozenset()
    first: int = 0
    outputs: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.losses_to_come = sum(self.sizes[number] > 0 for number in self.own_losses)

    def begin_again(self, loss_scale: float) -> None:
        """Forget the losses so far; how many ranks asked to stop is known as before."""
        self.loss.zero_()
        self.loss_scale = loss_scale
        self.__post_init__()

    def totals(self) -> Tensor:
        """``[sum, weight, stops]`` as one message."""
        return torch.cat([self.loss, torch.tensor([float(self.stops)], dtype=torch.float64)])

    def learn(self, totals: Tensor) -> None:
        """Take what :meth:`totals` of all ranks together say."""
        self.loss.copy_(totals[:2])
        self.stops = round(float(totals[2]))
        self.knows_totals = True

    @property
    def numbers(self) -> range:
        """The numbers that actions give to its micro-batches."""
        return range(self.first, self.first + len(self.sizes))

    def index(self, number: int) -> int:
        """The place, from 0, of the micro-batch that actions call ``number``."""
        return number - self.first

    def size(self, number: int) -> int:
        """Samples of the micro-batch that actions call ``number``."""
        return self.sizes[number - self.first]

    def key(self, number: int) -> tuple[bool, int, int]:
        """What a boundary's shapes may depend on, of the micro-batch that actions call ``number``."""
        return self.training, self.signature, self.size(number)


@dataclass(frozen=True)
class BoundarySpec:
    """Shapes of what crosses one boundary: announced once, then known to both ends.

    Args:
        structure: how the tensors are put together.
        tensors: shape, dtype and requires_grad of each.
    """

    structure: Structure
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], structure: Structure) -> BoundarySpec:
        """Of a flattened boundary."""
        return cls(structure, tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors))

    def describes(self, tensors: Sequence[Tensor], structure: Structure) -> bool:
        """Whether a flattened boundary has these shapes; compares without building another."""
        return (
            len(tensors) == len(self.tensors)
            and all(
                tensor.shape == shape and tensor.dtype == dtype and tensor.requires_grad == grad
                for tensor, (shape, dtype, grad) in zip(tensors, self.tensors, strict=True)
            )
            and structure == self.structure
        )

    def to_bytes(self) -> bytes:
        tensors = [(shape, str(dtype).removeprefix("torch."), grad) for shape, dtype, grad in self.tensors]
        return json.dumps([self.structure, tensors]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> BoundarySpec:
        structure, tensors = json.loads(data)
        return cls(structure, tuple((tuple(shape), getattr(torch, dtype), grad) for shape, dtype, grad in tensors))

    def allocate(self, device: torch.device) -> list[Tensor]:
        """Empty tensors of these shapes, to receive into."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in self.tensors]

    def allocate_gradients(self, device: torch.device) -> list[Tensor]:
        """Empty tensors for the gradients of those that require them."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, grad in self.tensors if grad]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The boundary made of received tensors, which are leaves that require gradients where the sender's do."""
        for tensor, (_, _, grad) in zip(tensors, self.tensors, strict=True):
            tensor.requires_grad_(grad)
        return unflatten(tensors, self.structure)


def split_microbatches(value: Any, samples: int, count: int) -> list[Any]:
    """``torch.tensor_split`` of every tensor of ``value`` on its first axis; entries may have no samples."""
    ends = []
    start = 0
    for size in split_sizes(samples, count):
        ends.append((start, start + size))
        start += size
    return [map_tensors(lambda t, a=a, b=b: t[a:b], value) for a, b in ends]  # type: ignore[misc]


def with_stand_ins(value: Any, parts: Sequence[Any], numbers: Iterable[int]) -> list[Any]:
    """``parts`` with one sample in each of the named micro-batches: the batch's first, or zeros where it has none."""
    one = map_tensors(lambda t: t[:1] if len(t) else t.new_zeros((1, *t.shape[1:])), value)
    return [one if number in set(numbers) else part for number, part in enumerate(parts)]


def join_microbatches(parts: Sequence[Any]) -> Any:
    """The inverse of :func:`split_microbatches` for outputs of one structure: tensors joined on their first axis.

    Tensors without axes, which belong to no sample, are stacked.
    """
    flats = [flatten(part) for part in parts]
    columns = zip(*(tensors for tensors, _ in flats), strict=True)
    return unflatten([torch.cat(c) if c[0].dim() else torch.stack(c) for c in columns], flats[0][1])
