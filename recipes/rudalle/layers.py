"""The layers of Malevich: embedding, sandwich transformer layer, head. [batch, seq, width] flows between them.

Shape letters: B samples, S positions, D width, H heads, T text tokens, G side of the image in tokens.
Parameter names are those of the released weights (ai-forever/ru-dalle, Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.recipes.rudalle.masks import MaskKind, layer_mask

__all__ = ["Attention", "Embedding", "Head", "KeyValues", "MalevichConfig", "SandwichLayer"]

_PB_RELAX = 32.0  # CogView 2.4 (arXiv 2105.13290): scores are shifted while scaled down, for fp16's sake
_FP16_MAX = 65504.0
_MASKED = -10000.0
_GELU_SCALE = 0.7978845608028654  # the square root of 2 / pi


@dataclass(frozen=True, slots=True)
class MalevichConfig:
    """Sizes and switches of the model.

    Args:
        text_vocab: ids of the text tokenizer; ``text_length`` ids for the pads of each position come on top.
        image_vocab: codes of the image tokenizer.
        text_length: T, tokens of a caption with its first and last marks and pads.
        grid: G, tokens per side of an image.
        width, layers, heads: features per token, transformer layers, attention heads.
        kernel: side of the convolution mask.
        text_positions: rows of the text position table; null = T (the released weights have T + 1).
        dropout: of attention probabilities and of both sub-layers' outputs.
        attention: ``eager`` = the published arithmetic with all scores in memory; ``sdpa`` = the same
            values up to rounding by torch's fused kernel.
        pb_relax: eager only: subtract the largest score while scaled down (changes nothing but rounding).
        masks: sparse masks; off = every layer sees everything before it.
        conv_wraps: the convolution mask of the second release.
        init: ``reference`` = PyTorch's defaults, as published; ``scratch`` = what learns from random weights.
        gelu: ``fused`` = torch's kernel, which keeps its input; ``formula`` = the published code's products one by
            one, of which autograd keeps seven tensors, compiled by TorchScript or not.
        gradient_shrink: factor on the embeddings' gradient (CogView's trick).
    """

    text_vocab: int
    image_vocab: int
    text_length: int
    grid: int
    width: int
    layers: int
    heads: int
    kernel: int = 11
    text_positions: int | None = None
    dropout: float = 0.0
    attention: str = "eager"
    pb_relax: bool = True
    masks: bool = True
    conv_wraps: bool = False
    init: str = "reference"
    gelu: str = "fused"
    gradient_shrink: float = 0.1

    @property
    def sequence_length(self) -> int:
        """Positions fed to the model: the caption, and the image without its last token."""
        return self.text_length + self.grid**2 - 1

    @property
    def num_text_targets(self) -> int:
        """The first positions, which predict text; all later ones predict image tokens."""
        return self.text_length - 1


class Embedding(nn.Module):
    """Ids [B, S], the caption's T first, to [B, S, D]. Pads (id 0) get an id of their own per position."""

    def __init__(self, config: MalevichConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.text_embeddings = nn.Embedding(config.text_vocab + config.text_length, width)
        self.image_embeddings = nn.Embedding(config.image_vocab, width)
        self.text_pos_embeddings = nn.Embedding(config.text_positions or config.text_length, width)
        self.image_row_embeddings = nn.Embedding(config.grid, width)
        self.image_col_embeddings = nn.Embedding(config.grid, width)
        if config.init == "scratch":
            for table in self.children():
                nn.init.normal_(table.weight, std=0.2)  # type: ignore[arg-type]

    @staticmethod
    def tensor_plan() -> dict[str, str]:
        """How ranks divide the embedding: rows of the large tables."""
        return {"text_embeddings": "embedding", "image_embeddings": "embedding"}

    def forward(self, ids: Tensor) -> Tensor:
        length = self.config.text_length
        text, image = self.embed_text(ids[:, :length]), self.embed_image(ids[:, length:], 0)
        embedded = torch.cat([text, image], dim=1)
        # Exactly the embedding forward; backward its gradient times the factor.
        return torch.lerp(embedded.detach(), embedded, self.config.gradient_shrink)

    def embed_text(self, ids: Tensor) -> Tensor:
        """Caption ids [B, T] to [B, T, D]."""
        length = self.config.text_length
        pads = self.config.text_vocab + torch.arange(length, device=ids.device)
        tokens: Tensor = self.text_embeddings(torch.where(ids == 0, pads, ids))
        return tokens + self.text_pos_embeddings.weight[:length]

    def embed_image(self, ids: Tensor, first: int) -> Tensor:
        """Image ids [B, n], those of the positions from ``first`` on in reading order, to [B, n, D]."""
        rows, columns = self.image_row_embeddings.weight, self.image_col_embeddings.weight
        positions = (rows[:, None] + columns[None]).flatten(0, 1)
        tokens: Tensor = self.image_embeddings(ids)
        return tokens + positions[first : first + ids.shape[1]]


@dataclass(slots=True)
class KeyValues:
    """Keys and values of the positions seen so far, [B, H, seen, D / H], for sampling token by token."""

    key: Tensor | None = None
    value: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.key is None else self.key.shape[2]

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add later positions; return all of them."""
        self.key = key if self.key is None else torch.cat([self.key, key], dim=2)
        self.value = value if self.value is None else torch.cat([self.value, value], dim=2)
        return self.key, self.value


class Attention(nn.Module):
    """Masked self-attention with one fused projection."""

    def __init__(self, config: MalevichConfig, kind: MaskKind) -> None:
        super().__init__()
        self.heads = config.heads
        self.fused = config.attention == "sdpa"
        self.pb_relax = config.pb_relax
        self.dropout_rate = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.dense = nn.Linear(config.width, config.width)
        # Masks are laid over what positions predict, so the last text position counts as the image's first.
        mask = layer_mask(kind, config.num_text_targets, config.grid, config.kernel, config.conv_wraps)
        self.register_buffer("mask", mask, persistent=False)
        self.mask: Tensor

    def forward(self, hidden: Tensor, seen: KeyValues | None = None) -> Tensor:
        """[B, S, D] to the same; with ``seen``, ``hidden`` holds the positions that follow those seen."""
        batch, length, width = hidden.shape
        split = self.query_key_value(hidden).view(batch, length, 3, -1, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        first = 0
        if seen is not None:
            first = seen.length
            key, value = seen.extend(key, value)
        mask = self.mask[first : first + length, : first + length]
        mixed = self._mix(query, key, value, mask)
        return self.dense(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        dropout = self.dropout_rate if self.training else 0.0
        if self.fused:
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        scores = (query / query.shape[-1] ** 0.5) @ key.transpose(-1, -2)
        visible = mask.to(scores.dtype)
        scores = scores * visible + _MASKED * (1 - visible)
        if self.pb_relax:
            scaled = scores / _PB_RELAX
            scores = (scaled - scaled.detach().amax(dim=(-2, -1), keepdim=True)) * _PB_RELAX
        return functional.dropout(scores.softmax(dim=-1), dropout, training=dropout > 0) @ value


class FeedForward(nn.Module):
    """Four times wider in between, tanh-GELU."""

    def __init__(self, width: int, gelu: str = "fused") -> None:
        super().__init__()
        self.gelu = _gelu_formula if gelu == "formula" else partial(functional.gelu, approximate="tanh")
        self.dense_h_to_4h = nn.Linear(width, 4 * width)
        self.dense_4h_to_h = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.gelu(self.dense_h_to_4h(hidden)))  # type: ignore[no-any-return]


def _gelu_formula(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(_GELU_SCALE * x * (1.0 + 0.044715 * x * x)))


class SandwichLayer(nn.Module):
    """A transformer layer with LayerNorms before and after each sub-layer (Sandwich-LN, arXiv 2105.13290)."""

    def __init__(self, config: MalevichConfig, kind: MaskKind) -> None:
        super().__init__()
        self.dropout_rate = config.dropout
        self.clamps = config.attention == "eager"
        self.input_layernorm = nn.LayerNorm(config.width)
        self.attention = Attention(config, kind)
        self.before_first_addition_layernorm = nn.LayerNorm(config.width)
        self.post_attention_layernorm = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config.width, config.gelu)
        self.before_second_addition_layernorm = nn.LayerNorm(config.width)
        if config.init == "scratch":
            _init_linears(self)
            # With gain 1 the normed sub-layers drown the embeddings that they are added to.
            nn.init.constant_(self.before_first_addition_layernorm.weight, 0.1)
            nn.init.constant_(self.before_second_addition_layernorm.weight, 0.1)

    @staticmethod
    def tensor_plan() -> dict[str, str]:
        """How ranks divide the layer: whole heads, and parts of the feed-forward layer."""
        return {
            "attention.query_key_value": "packed_column:3",
            "attention.dense": "row",
            "mlp.dense_h_to_4h": "column",
            "mlp.dense_4h_to_h": "row",
        }

    def forward(self, hidden: Tensor, seen: KeyValues | None = None) -> Tensor:
        attended = self.attention(self.input_layernorm(hidden), seen)
        if self.clamps:
            attended = attended.clamp(-_FP16_MAX, _FP16_MAX)
        hidden = hidden + self.before_first_addition_layernorm(self._drop(attended))
        fed = self._drop(self.mlp(self.post_attention_layernorm(hidden)))
        return hidden + self.before_second_addition_layernorm(fed)  # type: ignore[no-any-return]

    def _drop(self, hidden: Tensor) -> Tensor:
        if not self.dropout_rate:
            return hidden
        return functional.dropout(hidden, self.dropout_rate, self.training)


class Head(nn.Module):
    """[B, S, D] to (text logits [B, T - 1, text ids], image logits [B, G², codes]): each only where it counts."""

    def __init__(self, config: MalevichConfig) -> None:
        super().__init__()
        self.num_text_targets = config.num_text_targets
        self.vocabularies = [config.text_vocab + config.text_length, config.image_vocab]
        self.final_layernorm = nn.LayerNorm(config.width)
        self.to_logits = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, sum(self.vocabularies)))
        if config.init == "scratch":
            _init_linears(self)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.to_logits[0](self.final_layernorm(hidden))
        (text_weight, image_weight), (text_bias, image_bias) = self._rows()
        return (
            functional.linear(normed[:, : self.num_text_targets], text_weight, text_bias),
            functional.linear(normed[:, self.num_text_targets :], image_weight, image_bias),
        )

    def image_logits(self, hidden: Tensor) -> Tensor:
        """Image logits [B, codes] of one position [B, D]."""
        (_, weight), (_, bias) = self._rows()
        return functional.linear(self.to_logits[0](self.final_layernorm(hidden)), weight, bias)

    def _rows(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        linear = self.to_logits[1]
        assert isinstance(linear, nn.Linear)
        return torch.split(linear.weight, self.vocabularies), torch.split(linear.bias, self.vocabularies)


def _init_linears(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.Linear):
            nn.init.normal_(child.weight, std=0.02)
            nn.init.zeros_(child.bias)
