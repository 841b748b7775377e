"""A small decoder-only transformer, given as layers that can be built one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Block", "Gpt", "Head", "TokenEmbedding", "build"]


class TokenEmbedding(nn.Module):
    """Token ids [batch, seq] to [batch, seq, width], with learned positions."""

    @staticmethod
    def tensor_plan() -> dict[str, str]:
        """How ranks divide the embedding: rows of the table."""
        return {"tokens": "embedding"}

    def __init__(self, vocab_size: int, sequence_length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, token_ids: Tensor) -> Tensor:
        embedded = self.tokens(token_ids) + self.positions.weight[: token_ids.shape[1]]
        return self.dropout(embedded)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm causal attention and feed-forward; [batch, seq, width] in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout_rate = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    @staticmethod
    def tensor_plan() -> dict[str, str]:
        """How ranks divide the block: whole heads, and parts of the feed-forward layer."""
        return {
            "query_key_value": "packed_column:3",
            "attention_out": "row",
            "up": "column",
            "down": "row",
        }

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(hidden)
        return hidden + self.feed_forward(hidden)

    def attention(self, hidden: Tensor) -> Tensor:
        """What the attention adds to ``hidden``."""
        return self.dropout(self._attend(self.attention_norm(hidden)))  # type: ignore[no-any-return]

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """What the feed-forward layers add to ``hidden``."""
        fed = self.down(functional.gelu(self.up(self.feed_forward_norm(hidden))))
        return self.dropout(fed)  # type: ignore[no-any-return]

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.query_key_value(hidden).view(batch, length, 3, -1, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout_rate if self.training else 0.0
        )
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class Head(nn.Module):
    """[batch, seq, width] to logits [batch, seq, vocabulary]."""

    @staticmethod
    def tensor_plan() -> dict[str, str]:
        """How ranks divide the head: parts of the vocabulary."""
        return {"to_logits": "column_gathered"}

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.to_logits = nn.Linear(width, vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.to_logits(self.norm(hidden))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """The description of a model: it holds no weights until a layer of :meth:`layers` is called."""

    def __init__(
        self, vocab_size: int, sequence_length: int, width: int, num_blocks: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.width = width
        self.num_blocks = num_blocks
        self.heads = heads
        self.dropout = dropout

    def layers(self) -> list[Callable[[], nn.Module]]:
        """Embedding, blocks and head, first to last, each a callable that builds it with fresh weights."""
        return [
            partial(TokenEmbedding, self.vocab_size, self.sequence_length, self.width, self.dropout),
            *(partial(Block, self.width, self.heads, self.dropout) for _ in range(self.num_blocks)),
            partial(Head, self.vocab_size, self.width),
        ]


def build(vocab_size: int, sequence_length: int, width: int, layers: int, heads: int, dropout: float = 0.0) -> Gpt:
    """A GPT with ``layers`` blocks; the value between its layers is one tensor [batch, seq, width].

    Args:
        vocab_size: number of token ids.
        sequence_length: maximal number of tokens in a sample.
        width: features per token.
        layers: transformer blocks; embedding and head are two more layers of the model.
        heads: attention heads; must divide ``width``.
        dropout: dropout probability of the embeddings, the attention probabilities and the outputs of both sub-layers.

    Raises:
        ValueError: ``heads`` does not divide ``width``.
    """
    if width % heads:
        raise ValueError(f"heads = {heads} must divide width = {width}")
    return Gpt(vocab_size, sequence_length, width, layers, heads, dropout)
