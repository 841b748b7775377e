"""The models, in plain PyTorch: a residual network, a GPT, unrolled LSTMs, a U-Net, and the emoji ruDALL-E."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.recipes.rudalle.loss import weighted_cross_entropy
from runner.recipes.rudalle.model import assemble
from runner.zoo import gpt

__all__ = ["MODELS", "Task"]

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """A model with a batch and a loss.

    Args:
        build: makes the model, whose children or ``layers()`` are the chain; the caller seeds the generators.
        batch: input and target.
        loss: of output and target.
    """

    build: Callable[[], nn.Module]
    batch: tuple[Tensor, Tensor]
    loss: Loss


class _Residual(nn.Module):
    """Two convolutions with batch norm, and a connection past them; [batch, channels, height, width]."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU(), nn.Dropout(0.1),
            nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made),
        )  # fmt: skip
        self.past = nn.Conv2d(given, made, 1, stride, bias=False) if (given, stride) != (made, 1) else nn.Identity()

    def forward(self, value: Tensor) -> Tensor:
        return torch.relu(self.body(value) + self.past(value))


def _resnet() -> nn.Sequential:
    shapes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 1)]
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(stem, *(_Residual(*shape) for shape in shapes), head)


class _Step(nn.Module):
    """One time step of an LSTM, of which all steps share the cell. It carries the sequence along.

    Input and output are (sequence [batch, time, width], hidden, memory), both [batch, width].
    """

    def __init__(self, cell: nn.LSTMCell, time: int) -> None:
        super().__init__()
        self.cell, self.time = cell, time

    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        sequence, hidden, memory = state
        hidden, memory = self.cell(sequence[:, self.time], (hidden, memory))
        return sequence, hidden, memory


class _Start(nn.Module):
    """Embeds the sequence, and starts with a state of zeros."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sequence = self.embedding(ids)
        zeros = torch.zeros_like(sequence[:, 0])
        return sequence, zeros, zeros


class _End(nn.Module):
    """Logits of the word that the last hidden state predicts."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, words)

    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.head(state[1])
        return logits


def _lstm() -> nn.Sequential:
    """An encoder of 24 steps and a decoder of 24 more, which goes on from its state."""
    width, words = 64, 50
    encoder, decoder = nn.LSTMCell(width, width), nn.LSTMCell(width, width)
    steps = [_Step(encoder if time < 24 else decoder, time) for time in range(48)]
    return nn.Sequential(_Start(words, width), *steps, _End(words, width))


Skips = tuple[Tensor, ...]


class _Down(nn.Module):
    """Halves the picture, and adds what it was to the skips; the first element is the picture."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU())
        self.pool = nn.MaxPool2d(2)

    def forward(self, value: Tensor | Skips) -> Skips:
        picture, skips = (value, ()) if isinstance(value, Tensor) else (value[0], value[1:])
        made = self.body(picture)
        return (self.pool(made), *skips, made)


class _Up(nn.Module):
    """Doubles the picture, and takes the last skip beside it."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2)
        self.body = nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU())

    def forward(self, value: Skips) -> Tensor | Skips:
        picture, *skips, skip = value
        made: Tensor = self.body(torch.cat([self.up(picture), skip], dim=1))
        return (made, *skips) if skips else made


class _Middle(nn.Module):
    """A convolution at the lowest resolution; skips pass by."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Dropout(0.2))

    def forward(self, value: Skips) -> Skips:
        return (self.body(value[0]), *value[1:])


def _unet() -> nn.Sequential:
    down = [_Down(3, 16), _Down(16, 32), _Down(32, 64)]
    up = [_Up(128, 32), _Up(64, 16), _Up(32, 16)]
    return nn.Sequential(*down, _Middle(64), _Middle(64), *up, nn.Conv2d(16, 2, 1))


def _tokens_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _pictures(samples: int, classes: int, size: int, targets: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    generator = _generator()
    pictures = torch.randn(samples, 3, size, size, generator=generator)
    return pictures, torch.randint(classes, (samples, *targets), generator=generator)


def _ids(samples: int, words: int, length: int, targets: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    generator = _generator()
    ids = torch.randint(words, (samples, length), generator=generator)
    return ids, torch.randint(words, (samples, *targets), generator=generator)


def _malevich() -> nn.Sequential:
    return assemble(
        text_vocab=256, image_vocab=128, text_length=16, grid=4, width=64, layers=6, heads=4, kernel=3, dropout=0.1,
        attention="sdpa", init="scratch",
    )  # fmt: skip


MODELS: Mapping[str, Callable[..., Task]] = {
    "ResNet": lambda samples=8: Task(_resnet, _pictures(samples, 10, 32), nn.functional.cross_entropy),
    "GPT": lambda samples=8: Task(
        lambda: gpt.build(64, 32, 64, 12, 4, 0.1), _ids(samples, 64, 32, (32,)), _tokens_loss
    ),
    "LSTM": lambda samples=8: Task(_lstm, _ids(samples, 50, 48), nn.functional.cross_entropy),
    "U-Net": lambda samples=8: Task(_unet, _pictures(samples, 2, 32, (32, 32)), nn.functional.cross_entropy),
    "ruDALL-E": lambda samples=8: Task(_malevich, _ids(samples, 128, 31, (31,)), weighted_cross_entropy),
}
"""By name, for a number of samples; with 8, a machine without an accelerator takes a step in milliseconds."""
