"""The models of drawn requests, their data and losses: small, and each with what is hard about real ones.

Plain PyTorch. A kind is a function from a width, a number of layers and a rate of dropout to an ``nn.Sequential``,
whose children are the layers; it is in the draws by being in :data:`KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

CLASSES, LENGTH, TOKENS, SIDE = 3, 4, 11, 4


class InPlace(nn.Module):
    """A linear layer whose output in-place operators change: one that keeps its output, and one that keeps nothing."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.act, self.drop = nn.Linear(width, width), nn.ReLU(inplace=True), nn.Dropout(dropout)

    def forward(self, value: Tensor) -> Any:
        return self.drop(self.act(self.linear(value).mul_(0.5).add_(value)))


def mlp(width: int, layers: int, dropout: float) -> nn.Sequential:
    hidden = (InPlace(width, dropout) for _ in range(max(1, layers - 2)))
    return nn.Sequential(nn.Linear(2, width), *hidden, nn.Linear(width, CLASSES))


class Convolution(nn.Module):
    """A convolution with a batch norm; every second one averages over all batches."""

    def __init__(self, inputs: int, width: int, number: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, width, 3, padding=1, bias=bool(number % 2))
        self.norm = nn.BatchNorm2d(width, momentum=None if number % 2 else 0.1)
        self.drop = nn.Dropout2d(dropout)

    def forward(self, value: Tensor) -> Any:
        return self.drop(functional.relu_(self.norm(self.conv(value))))


class Pooled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, CLASSES)

    def forward(self, value: Tensor) -> Any:
        return self.head(value.mean((2, 3)))


def convolutions(width: int, layers: int, dropout: float) -> nn.Sequential:
    convs = (Convolution(width if number else 2, width, number, dropout) for number in range(max(1, layers - 1)))
    return nn.Sequential(*convs, Pooled(width))


class Block(nn.Module):
    """A transformer's block of two heads."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.feed_norm, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, value: Tensor) -> Any:
        heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.three(self.norm(value)).chunk(3, -1))
        queries, keys, values = heads
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        value = value + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return value + self.drop(self.feed(self.feed_norm(value)))


class Unembed(nn.Module):
    """Hidden states to tokens, by the weight of the embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Any:
        return functional.linear(hidden, self.weight)


def tied(width: int, layers: int, dropout: float) -> nn.Sequential:
    embedding = nn.Embedding(TOKENS, width)
    blocks = (Block(width, dropout) for _ in range(max(1, layers - 2)))
    return nn.Sequential(embedding, *blocks, Unembed(embedding))


def shared(width: int, layers: int, dropout: float) -> nn.Sequential:
    """One block that is every second layer."""
    again = Block(width, dropout)
    blocks = (again if number % 2 else Block(width, dropout) for number in range(max(2, layers - 2)))
    return nn.Sequential(nn.Embedding(TOKENS, width), *blocks, nn.Linear(width, TOKENS))


class Cells(nn.Module):
    """A recurrent cell over a sequence."""

    def __init__(self, inputs: int, width: int, number: int, dropout: float) -> None:
        super().__init__()
        self.cell: Any = (nn.GRUCell, nn.RNNCell)[number % 2](inputs, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, value: Tensor) -> Any:
        state = value.new_zeros(len(value), self.cell.hidden_size)
        states = []
        for step in value.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return self.drop(torch.stack(states, 1))


class LastStep(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, CLASSES)

    def forward(self, value: Tensor) -> Any:
        return self.head(value[:, -1])


def recurrent(width: int, layers: int, dropout: float) -> nn.Sequential:
    cells = (Cells(width if number else 2, width, number, dropout) for number in range(max(1, layers - 1)))
    return nn.Sequential(*cells, LastStep(width))


class Skipping(nn.Module):
    """Hands on what it gets beside its own output, in a dict, and drops the oldest part."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, value: Any) -> Any:
        given: dict[str, Any] = {"now": value, "before": (value, value)} if isinstance(value, Tensor) else value
        made = self.drop(torch.tanh(self.linear(given["now"] + given["before"][0])))
        return {"now": made, "before": (given["before"][1], given["now"]), "depth": given.get("depth", 0) + 1}


class TwoHeads(nn.Module):
    """Two outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.classes, self.value = nn.Linear(width, CLASSES), nn.Linear(width, 1)

    def forward(self, value: dict[str, Any]) -> Any:
        return self.classes(value["now"]), self.value(value["before"][0])


def skips(width: int, layers: int, dropout: float) -> nn.Sequential:
    hidden = (Skipping(width, dropout) for _ in range(max(1, layers - 2)))
    return nn.Sequential(nn.Linear(2, width), *hidden, TwoHeads(width))


class Remembering(nn.Module):
    """Reads a buffer that it also changes, in two ways: in place, and by a new tensor; one of them is not saved."""

    seen: Tensor
    calls: Tensor
    last: Tensor

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(dropout)
        self.register_buffer("seen", torch.ones(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, value: Tensor) -> Any:
        made: Tensor = self.drop(self.linear(value * self.seen.clone()).tanh() * self.scale)
        if self.training:
            self.seen.mul_(0.9).add_(0.1 * made.detach().mean(0))
            self.calls += 1
        return made + value


def buffers(width: int, layers: int, dropout: float) -> nn.Sequential:
    hidden = (Remembering(width, dropout) for _ in range(max(1, layers - 2)))
    return nn.Sequential(nn.Linear(2, width), *hidden, nn.Linear(width, CLASSES))


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over samples."""
    return functional.cross_entropy(output, target)


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``(sum, weight)`` over the tokens that are no padding, which are fewer in some samples."""
    flat = target.flatten()
    return functional.cross_entropy(output.flatten(0, 1), flat, ignore_index=0, reduction="sum"), (flat != 0).sum()


def two_losses(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The mean over samples, of both outputs."""
    classes, value = output
    return functional.cross_entropy(classes, target) + value.squeeze(1).pow(2).mean()


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """So many seeded samples."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.inputs[number], self.targets[number]


def _features(count: int, generator: torch.Generator, *shape: int) -> Samples:
    made = torch.randn(count, *shape, generator=generator)
    return Samples(made, torch.randint(CLASSES, (count,), generator=generator))


def _sentences(count: int, generator: torch.Generator) -> Samples:
    draw = (torch.randint(1, TOKENS, (count, LENGTH), generator=generator) for _ in range(2))
    inputs, targets = draw
    targets[1::3, -2:] = 0
    return Samples(inputs, targets)


@dataclass(frozen=True)
class Kind:
    """A kind of model, the shape of its samples (None: tokens), and the name of its loss.

    Args:
        fewest: the smallest width.
        by_sample: whether each sample's loss depends on this sample alone, where nothing is dropped.
        divides: whether it has layers that ranks can divide.
    """

    build: Callable[[int, int, float], nn.Sequential]
    sample: tuple[int, ...] | None
    loss: str = "class_loss"
    fewest: int = 4
    by_sample: bool = True
    divides: bool = False


KINDS = {
    "mlp": Kind(mlp, (2,)),
    "convolutions": Kind(convolutions, (2, SIDE, SIDE), by_sample=False),
    "tied": Kind(tied, None, "token_loss", divides=True),
    "shared": Kind(shared, None, "token_loss", divides=True),
    "recurrent": Kind(recurrent, (LENGTH, 2)),
    "skips": Kind(skips, (2,), "two_losses"),
    "buffers": Kind(buffers, (2,), by_sample=False),
}


def build(kind: str, width: int = 16, layers: int = 4, dropout: float = 0.0) -> nn.Sequential:
    """The model of a kind, with weights from the seeded generator."""
    return KINDS[kind].build(width, layers, dropout)


def samples(kind: str, count: int = 600) -> Samples:
    """The data of a kind."""
    generator = torch.Generator().manual_seed(7)
    shape = KINDS[kind].sample
    return _sentences(count, generator) if shape is None else _features(count, generator, *shape)
