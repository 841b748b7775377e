"""The published loss: text and image cross-entropy, the image's weighted."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Output", "image_and_text_cross_entropy", "weighted_cross_entropy"]

Output = tuple[Tensor, Tensor]  # text logits [B, t, text ids], image logits [B, i, codes]


def image_and_text_cross_entropy(output: Output, target: Tensor, reduction: str = "mean") -> tuple[Tensor, Tensor]:
    """(text, image) cross-entropies in fp32 nats; ``reduction`` as in torch (``none`` gives flat values).

    Args:
        output: text logits [B, t, text ids] and image logits [B, i, codes].
        target: [B, t + i] ids, the text's first.
    """
    text_logits, image_logits = output
    text_target, image_target = torch.split(target, [text_logits.shape[1], image_logits.shape[1]], dim=1)
    return (
        functional.cross_entropy(text_logits.flatten(0, 1).float(), text_target.flatten(), reduction=reduction),
        functional.cross_entropy(image_logits.flatten(0, 1).float(), image_target.flatten(), reduction=reduction),
    )


def weighted_cross_entropy(output: Output, target: Tensor, image_weight: float = 1000.0) -> Tensor:
    """(text + w · image) / (w + 1), each a mean over tokens, hence a mean over samples.

    Source: rudalle/dalle/model.py of ai-forever/ru-dalle, ``loss_img_weight``; 1000 is Emojich's.
    """
    text, image = image_and_text_cross_entropy(output, target)
    return (text + image_weight * image) / (image_weight + 1)
