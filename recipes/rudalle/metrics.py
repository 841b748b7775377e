"""Validation figures of a whole model in one process, split by whether its captions were trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runner.recipes.rudalle.data import EmojiDataset
from runner.recipes.rudalle.loss import image_and_text_cross_entropy

__all__ = ["Validation", "validate"]

_BATCH = 55


@dataclass(frozen=True, slots=True)
class Validation:
    """Mean cross-entropies in nats per token; ``seen`` and ``unseen`` by caption, NaN where there is none."""

    image: float
    image_seen: float
    image_unseen: float
    text: float
    text_seen: float
    text_unseen: float


@torch.no_grad()
def validate(model: nn.Module, dataset: EmojiDataset) -> Validation:
    """Cross-entropies of ``model`` on ``dataset``; ``model`` maps inputs to (text logits, image logits)."""
    training = model.training
    model.eval()
    text, image = [], []
    for inputs, targets in zip(*(torch.split(tensor, _BATCH) for tensor in dataset.tensors), strict=True):
        of_text, of_image = image_and_text_cross_entropy(model(inputs), targets, reduction="none")
        text.append(of_text.view(len(inputs), -1).mean(dim=1))
        image.append(of_image.view(len(inputs), -1).mean(dim=1))
    model.train(training)
    return Validation(*_split(torch.cat(image), dataset.seen), *_split(torch.cat(text), dataset.seen))


def _split(values: Tensor, seen: Tensor) -> tuple[float, float, float]:
    return float(values.mean()), float(values[seen].mean()), float(values[~seen].mean())
