"""Small models that do what real ones do: tie, skip, normalise, drop, freeze, branch. Plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, TOKENS, LENGTH, CLASSES = 8, 13, 6, 5


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all tokens."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Unembed(nn.Module):
    """Hidden states to tokens, by the weight of the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: torch.Tensor) -> Any:
        return functional.linear(hidden, self.weight)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.hidden:
            x = functional.gelu(layer(x))
        return self.out(x)


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.query, self.both, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, memory: Any = None, mask: torch.Tensor | None = None) -> Any:
        key, value = self.both(x if memory is None else memory).chunk(2, -1)
        queries, keys, values = (
            t.view(*t.shape[:2], 2, WIDTH // 2).transpose(1, 2) for t in (self.query(x), key, value)
        )
        rate = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=rate)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, cross: bool = False) -> None:
        super().__init__()
        self.norm, self.attention, self.feed_norm = nn.LayerNorm(WIDTH), Attention(dropout), nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH)
        )
        if cross:
            self.cross_norm, self.cross = nn.LayerNorm(WIDTH), Attention(dropout)

    def forward(self, x: torch.Tensor, memory: Any = None, mask: torch.Tensor | None = None) -> Any:
        x = x + self.attention(self.norm(x), mask=mask)
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.feed(self.feed_norm(x))


class TiedGpt(nn.Module):
    def __init__(self, dropout: float = 0.0, tie: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tie:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> Any:
        length = ids.shape[1]
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(length, device=ids.device)))
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        first = torch.relu(self.down1(x))
        second = torch.relu(self.down2(functional.max_pool2d(first, 2)))
        middle = torch.relu(self.middle(functional.max_pool2d(second, 2)))
        x = torch.relu(self.up2(torch.cat([functional.interpolate(middle, scale_factor=2), second], 1)))
        x = torch.relu(self.up1(torch.cat([functional.interpolate(x, scale_factor=2), first], 1)))
        return self.out(x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.act(self.stem_norm(self.stem(x)))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.act(norm(conv(x)) + x)
        return self.head(x.mean((2, 3)))


class EncoderDecoder(nn.Module):
    """Called with keywords; the mask is optional, and not given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block(cross=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, source: Any, target: Any, mask: torch.Tensor | None = None) -> Any:
        memory, x = self.tokens(source), self.tokens(target)
        for block in self.encoder:
            memory = block(memory, mask=mask)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


class Mixture(nn.Module):
    """Experts that are mixed by a gate; gives a dict, and the loss uses both entries."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.trunk(x))
        gate = self.gate(x).softmax(-1)
        mixed = (torch.stack([expert(x) for expert in self.experts], -1) * gate.unsqueeze(1)).sum(-1)
        return {"logits": self.head(mixed), "gate": gate}


class SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.block(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.block(torch.tanh(self.between(x)))))


class FrozenBackbone(nn.Module):
    """A backbone that is not trained and keeps evaluating its batch norm, under a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.backbone.requires_grad_(False)
        self.neck, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            x = self.backbone(x)
        return self.head(torch.relu(self.neck(x)))


class Bags(nn.Module):
    """An embedding bag over ids, and dense features: two positional inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(TOKENS, WIDTH, mode="mean")
        self.dense = nn.Linear(3, WIDTH)
        self.hidden, self.out = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor, features: Any) -> Any:
        x = torch.cat([self.bag(ids), torch.relu(self.dense(features))], 1)
        return self.out(torch.tanh(self.hidden(x)))


def gpt2() -> nn.Module:
    from runner.zoo.huggingface import build

    return build(
        model_type="gpt2", vocab_size=TOKENS, max_position_embeddings=2 * LENGTH, hidden_size=WIDTH,
        num_hidden_layers=2, num_attention_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def bert() -> nn.Module:
    from runner.zoo.huggingface import build

    return build(
        task="masked", model_type="bert", vocab_size=TOKENS, max_position_embeddings=2 * LENGTH, hidden_size=WIDTH,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=2 * WIDTH,
    )  # fmt: skip


# Batches and losses


def _tokens(samples: int, generator: Any) -> torch.Tensor:
    return torch.randint(0, TOKENS, (samples, LENGTH), generator=generator)


def _classes(samples: int, generator: Any) -> torch.Tensor:
    return torch.randint(0, CLASSES, (samples,), generator=generator)


def _features(samples: int, generator: Any) -> torch.Tensor:
    return torch.randn(samples, WIDTH, generator=generator)


def _images(samples: int, generator: Any) -> torch.Tensor:
    return torch.randn(samples, 2, 8, 8, generator=generator)


def _pixels(samples: int, generator: Any) -> torch.Tensor:
    return torch.randn(samples, 1, 8, 8, generator=generator)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def mixture_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    balance = output["gate"].mean(0).pow(2).sum()
    return functional.cross_entropy(output["logits"], target) + 0.1 * balance


@dataclass(frozen=True)
class Case:
    """One model of the zoo.

    Args:
        make: builds it.
        inputs, targets: a batch of so many samples, drawn from a generator.
        loss: of output and target.
        bitwise: the pipeline adds gradients in the order of one process. Where a weight stands in two stages, each adds
            up its own share first, so that the sum is equal to rounding.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Any]
    targets: Callable[[int, torch.Generator], torch.Tensor]
    loss: Callable[..., Any] = cross_entropy
    bitwise: bool = True


ZOO = {
    "mlp": Case(Mlp, _features, _classes),
    "tied_gpt": Case(TiedGpt, _tokens, _tokens, bitwise=False),
    "unet": Case(UNet, _images, _pixels, functional.mse_loss),
    "resnet": Case(ResNet, _images, _classes),
    "encoder_decoder": Case(
        EncoderDecoder, lambda n, g: {"target": _tokens(n, g), "source": _tokens(n, g)}, _tokens, bitwise=False
    ),
    "mixture": Case(Mixture, _features, _classes, mixture_loss),
    "shared_block": Case(SharedBlock, _features, _classes, bitwise=False),
    "frozen_backbone": Case(FrozenBackbone, _features, _classes),
    "dropout": Case(lambda: TiedGpt(dropout=0.3, tie=False), _tokens, _tokens),
    "embedding_bag": Case(Bags, lambda n, g: (_tokens(n, g), torch.randn(n, 3, generator=g)), _classes),
    "gpt2": Case(gpt2, _tokens, _tokens, bitwise=False),
    "bert": Case(bert, _tokens, _tokens, bitwise=False),
}
