"""Models whose layers ranks divide, and their data. Plain PyTorch: it imports nothing of the runner."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

TOKENS, LENGTH, WIDTH, HEADS = 13, 6, 16, 4

RULES = {
    "table": "embedding",
    "*.three": "packed_column:3",
    "*.out": "row",
    "*.gate": "column",
    "*.up": "column",
    "*.down": "row",
    "head": "column_gathered",
}
"""How the model is divided; its norms and the table of positions are whole, those of each head are partial."""


class Block(nn.Module):
    """A transformer's block: attention with a norm of each head, and a gated feed-forward."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.size = width // HEADS
        self.norm, self.feed_norm, self.drop = nn.LayerNorm(width), nn.RMSNorm(width), nn.Dropout(dropout)
        self.three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head_norm = nn.LayerNorm(self.size)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, value: Tensor) -> Any:
        parts = self.three(self.norm(value)).chunk(3, -1)
        queries, keys, values = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(self.head_norm(queries), keys, values, is_causal=True)
        value = value + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        fed = self.feed_norm(value)
        return value + self.drop(self.down(functional.silu(self.gate(fed)) * self.up(fed)))


class Unembed(nn.Linear):
    """Hidden states to tokens, by the weight of the embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding.embedding_dim, embedding.num_embeddings, bias=False)
        self.weight = embedding.weight


def build(layers: int = 4, dropout: float = 0.0, tied: bool = False, tokens: int = TOKENS) -> nn.Sequential:
    embedding = nn.Embedding(tokens, WIDTH)
    head = Unembed(embedding) if tied else nn.Linear(WIDTH, tokens)
    named = {"table": embedding} | {f"block{at}": Block(WIDTH, dropout) for at in range(layers)} | {"head": head}
    model = nn.Sequential()
    for name, layer in named.items():
        model.add_module(name, layer)
    return model


def undividable(tokens: int = TOKENS) -> nn.Sequential:
    """Layers of which none has two maps one behind the other."""
    return nn.Sequential(nn.Embedding(tokens, WIDTH), nn.Linear(WIDTH, tokens))


def narrowing(tokens: int = TOKENS) -> nn.Sequential:
    """Layers that give fewer features if a column is not followed by a row."""
    return nn.Sequential(nn.Embedding(tokens, WIDTH), nn.Sequential(nn.Linear(WIDTH, tokens + 1)), nn.Softmax(-1))


class _Dropping(Block):
    """A block that drops some of its attention's probabilities."""

    def forward(self, value: Tensor) -> Any:
        heads = value.view(*value.shape[:2], HEADS, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1 if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).flatten(2))


def dropping(tokens: int = TOKENS) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(tokens, WIDTH), _Dropping(WIDTH, 0.0), nn.Linear(WIDTH, tokens))


class _Attending(nn.MultiheadAttention):
    """Self-attention by torch's module."""

    def forward(self, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(value, value, value, need_weights=False)[0]


def attending(tokens: int = TOKENS) -> nn.Sequential:
    attention = _Attending(WIDTH, HEADS, batch_first=True)
    return nn.Sequential(nn.Embedding(tokens, WIDTH), attention, nn.Linear(WIDTH, tokens))


class _Mean(nn.Embedding):
    """The mean of the tokens' vectors."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).mean(1)


def pooled(tokens: int = TOKENS) -> nn.Sequential:
    """Layers that ranks can divide, between which values have no tokens."""
    feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    return nn.Sequential(
        _Mean(tokens, WIDTH), feed, nn.Linear(WIDTH, LENGTH * tokens), nn.Unflatten(1, (LENGTH, tokens))
    )


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Samples(Dataset[Any]):
    """Sequences of tokens, each with the next ones as its target."""

    def __init__(self, tokens: int) -> None:
        drawn = torch.randint(tokens, (64, LENGTH + 1), generator=torch.Generator().manual_seed(5))
        self.inputs, self.targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, at: int) -> Any:
        return self.inputs[at], self.targets[at]


def data(tokens: int = TOKENS) -> Samples:
    return Samples(tokens)


def losses_alone() -> list[float]:
    """Losses of a plain loop over whole batches."""
    torch.manual_seed(3)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    samples, losses = data(), []
    for step in range(2):
        inputs, targets = (torch.stack([samples[step * 8 + at][part] for at in range(8)]) for part in (0, 1))
        value = loss(model(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(value)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


class _Overflow(torch.autograd.Function):
    """Gives its input; the gradient is infinite at the last of its features."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        made = gradients[0].clone()
        made[..., -1] = torch.inf
        return made


def overflowing(output: Tensor, target: Tensor) -> Tensor:
    """The loss, whose gradient is infinite at the last token's logits, which the last rank has, in the second step."""
    second = target[0].equal(data()[8][1])
    return loss(_Overflow.apply(output) if second else output, target)  # type: ignore[no-untyped-call, unused-ignore]


class _Drifting(nn.LayerNorm):
    """A norm whose bias moves by itself on the second rank."""

    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        if self.training and os.environ.get("RANK") == "1":
            with torch.no_grad():
                self.bias.data = self.bias.data + 1e-3
        return made


def drifting() -> nn.Sequential:
    model = build(layers=1)
    block: Any = model.block0
    block.norm = _Drifting(WIDTH)
    return model
