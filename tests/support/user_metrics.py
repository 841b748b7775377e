"""Metrics as a user writes them: plain PyTorch. Its text is also written into a user's directory."""

from __future__ import annotations

import torch


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).float().mean()


def error(output: torch.Tensor, target: torch.Tensor) -> float:
    return float((output.argmax(-1) != target).double().mean())


def recall(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of class 2 alone: the samples of the other classes do not count."""
    of_class = target == 2
    return ((output.argmax(-1) == 2) & of_class).sum(), of_class.sum()


def raising(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output[:, 99]


def per_sample(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).float()


def undefined(output: torch.Tensor, target: torch.Tensor) -> float:
    return float("nan")


def text(output: torch.Tensor, target: torch.Tensor) -> str:
    return "good"


def negative(output: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    return 1.0, -2.0
