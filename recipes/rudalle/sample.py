"""Draw images for captions, token by token, with the keys and values of earlier positions kept."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runner.recipes.rudalle.layers import Embedding, Head, KeyValues, SandwichLayer

__all__ = ["sample_images"]


@torch.no_grad()
def sample_images(
    model: nn.Sequential, text: Tensor, generator: torch.Generator, top_k: int = 64, temperature: float = 0.9
) -> Tensor:
    """Image codes [n, grid²] for caption ids [n, T].

    Args:
        model: all layers, as :func:`runner.recipes.rudalle.model.assemble` gives them.
        text: caption ids, marks and pads included; one row per image.
        generator: of the draws.
        top_k: most likely codes to draw from.
        temperature: divides the logits; below 1 is more cautious.
    """
    embedding, *layers, head = model
    assert isinstance(embedding, Embedding)
    assert isinstance(head, Head)
    training = model.training
    model.eval()
    seen = [KeyValues() for _ in layers]
    hidden = embedding.embed_text(text)
    codes: list[Tensor] = []
    for position in range(embedding.config.grid**2):
        for layer, cache in zip(layers, seen, strict=True):
            assert isinstance(layer, SandwichLayer)
            hidden = layer(hidden, cache)
        drawn = _draw(head.image_logits(hidden[:, -1]), generator, top_k, temperature)
        codes.append(drawn)
        hidden = embedding.embed_image(drawn, position)
    model.train(training)
    return torch.cat(codes, dim=1)


def _draw(logits: Tensor, generator: torch.Generator, top_k: int, temperature: float) -> Tensor:
    """One code [n, 1] of the ``top_k`` most likely in each row."""
    best, codes = (logits.float() / temperature).topk(min(top_k, logits.shape[-1]), dim=-1)
    chosen = torch.multinomial(best.softmax(dim=-1), 1, generator=generator)
    return codes.gather(1, chosen)
