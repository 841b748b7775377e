"""A decoder-only transformer with Attention Residuals: what a sublayer reads is an attention over depth.

Instead of the sum of everything before it, each sublayer reads a weighted mean, per token, of the token's embedding, of
the sums of earlier groups of blocks, and of the present group's sum so far. A learned query of the sublayer chooses the
weights. All of these cross every stage boundary, as skip connections do.

Source: Kimi Team 2026, "Attention Residuals", https://arxiv.org/abs/2603.15031 (the variant that is called Block
AttnRes); its details are taken from descriptions of it by others, among them Megatron-LM's pull request 6840.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from runner.zoo.gpt import Block, Gpt, Head, TokenEmbedding

__all__ = ["AttnRes", "DepthAttention", "DepthBlock", "DepthHead", "FirstSource", "build"]

Sources = tuple[Tensor, ...]
"""The embedding, the sums of the groups, and last the present group's sum so far; each [batch, seq, width]."""


class DepthAttention(nn.Module):
    """Sources to their mean [batch, seq, width], whose weights a learned query and the normalised sources decide.

    The query is zero at first, so that all sources weigh the same.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.query = nn.Parameter(torch.zeros(width))

    def forward(self, sources: Sources) -> Tensor:
        stacked = torch.stack(sources)
        weights = torch.softmax(self.norm(stacked) @ self.query, dim=0)
        return (weights.unsqueeze(-1) * stacked).sum(dim=0)


class FirstSource(TokenEmbedding):
    """Token ids [batch, seq] to their embedding as the only source."""

    def forward(self, token_ids: Tensor) -> Sources:  # type: ignore[override]  # a layer's value is its own affair
        return (super().forward(token_ids),)


class DepthBlock(Block):
    """Attention and feed-forward, each of which reads an attention over the sources; sources in and out.

    Args:
        width, heads, dropout: what they are for a :class:`~runner.zoo.gpt.Block`.
        opens_group: whether its outputs are the first of a new source.
    """

    def __init__(self, width: int, heads: int, dropout: float, *, opens_group: bool) -> None:
        super().__init__(width, heads, dropout)
        self.opens_group = opens_group
        self.before_attention = DepthAttention(width)
        self.before_feed_forward = DepthAttention(width)

    def forward(self, sources: Sources) -> Sources:  # type: ignore[override]  # a layer's value is its own affair
        attended = self.attention(self.before_attention(sources))
        sources = (*sources, attended) if self.opens_group else (*sources[:-1], sources[-1] + attended)
        fed = self.feed_forward(self.before_feed_forward(sources))
        return (*sources[:-1], sources[-1] + fed)


class DepthHead(Head):
    """Sources to logits [batch, seq, vocabulary], from an attention over all of them."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__(vocab_size, width)
        self.before = DepthAttention(width)

    def forward(self, sources: Sources) -> Tensor:  # type: ignore[override]  # a layer's value is its own affair
        return super().forward(self.before(sources))


class AttnRes(Gpt):
    """The description of a model: it holds no weights until a layer of :meth:`layers` is called."""

    def __init__(
        self, vocab_size: int, sequence_length: int, width: int, num_blocks: int, heads: int, dropout: float, group: int
    ) -> None:
        super().__init__(vocab_size, sequence_length, width, num_blocks, heads, dropout)
        self.group = group

    def layers(self) -> list[Callable[[], nn.Module]]:
        """Embedding, blocks and head, first to last, each a callable that builds it with fresh weights."""
        return [
            partial(FirstSource, self.vocab_size, self.sequence_length, self.width, self.dropout),
            *(
                partial(DepthBlock, self.width, self.heads, self.dropout, opens_group=number % self.group == 0)
                for number in range(self.num_blocks)
            ),
            partial(DepthHead, self.vocab_size, self.width),
        ]


def build(
    vocab_size: int, sequence_length: int, width: int, layers: int, group: int, heads: int, dropout: float = 0.0
) -> AttnRes:
    """A transformer with ``layers`` blocks; between its layers pass 1 + ceil(blocks so far / ``group``) tensors.

    Args:
        vocab_size: number of token ids.
        sequence_length: maximal number of tokens in a sample.
        width: features per token.
        layers: transformer blocks; embedding and head are two more layers of the model.
        group: so many blocks add up to one source; 1 makes every block a source of its own.
        heads: attention heads; must divide ``width``.
        dropout: dropout probability of the embeddings, the attention probabilities and the outputs of both sub-layers.

    Raises:
        ValueError: ``heads`` does not divide ``width``, or ``group`` is not positive.
    """
    if width % heads:
        raise ValueError(f"heads = {heads} must divide width = {width}")
    if group < 1:
        raise ValueError(f"group = {group} must be at least 1")
    return AttnRes(vocab_size, sequence_length, width, layers, heads, dropout, group)
