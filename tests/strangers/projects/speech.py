# mypy: ignore-errors
"""An encoder of sound and a decoder of text: sinusoids as a buffer, a sparse buffer of heads, one attention for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class ModelDimensions:
    n_mels: int = 5
    n_audio_ctx: int = 7
    n_audio_state: int = 16
    n_audio_head: int = 2
    n_audio_layer: int = 2
    n_vocab: int = 23
    n_text_ctx: int = 12
    n_text_state: int = 16
    n_text_head: int = 2
    n_text_layer: int = 2


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type(x.dtype)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def sinusoids(length: int, channels: int, max_timescale: int = 10000) -> Tensor:
    assert channels % 2 == 0
    increment = np.log(max_timescale) / (channels // 2 - 1)
    scaled = torch.arange(length)[:, np.newaxis] * torch.exp(-increment * torch.arange(channels // 2))[np.newaxis, :]
    return torch.cat([torch.sin(scaled), torch.cos(scaled)], dim=1)


class MultiHeadAttention(nn.Module):
    use_sdpa = True

    def __init__(self, n_state: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.query = Linear(n_state, n_state)
        self.key = Linear(n_state, n_state, bias=False)
        self.value = Linear(n_state, n_state)
        self.out = Linear(n_state, n_state)

    def forward(
        self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None, kv_cache: dict | None = None
    ) -> tuple[Tensor, Tensor | None]:
        q = self.query(x)
        if kv_cache is None or xa is None or self.key not in kv_cache:
            k, v = self.key(x if xa is None else xa), self.value(x if xa is None else xa)
        else:
            k, v = kv_cache[self.key], kv_cache[self.value]
        wv, qk = self.qkv_attention(q, k, v, mask)
        return self.out(wv), qk

    def qkv_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        n_ctx = q.shape[1]
        q, k, v = (part.view(*part.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) for part in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None and n_ctx > 1)
        return a.permute(0, 2, 1, 3).flatten(start_dim=2), None


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state: int, n_head: int, cross_attention: bool = False) -> None:
        super().__init__()
        self.attn, self.attn_ln = MultiHeadAttention(n_state, n_head), LayerNorm(n_state)
        self.cross_attn = MultiHeadAttention(n_state, n_head) if cross_attention else None
        self.cross_attn_ln = LayerNorm(n_state) if cross_attention else None
        self.mlp = nn.Sequential(Linear(n_state, 4 * n_state), nn.GELU(), Linear(4 * n_state, n_state))
        self.mlp_ln = LayerNorm(n_state)

    def forward(
        self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None, kv_cache: dict | None = None
    ) -> Tensor:
        x = x + self.attn(self.attn_ln(x), mask=mask, kv_cache=kv_cache)[0]
        if self.cross_attn is not None and self.cross_attn_ln is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, kv_cache=kv_cache)[0]
        return x + self.mlp(self.mlp_ln(x))


class AudioEncoder(nn.Module):
    def __init__(self, dims: ModelDimensions) -> None:
        super().__init__()
        state = dims.n_audio_state
        self.conv1 = nn.Conv1d(dims.n_mels, state, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(state, state, kernel_size=3, stride=2, padding=1)
        self.register_buffer("positional_embedding", sinusoids(dims.n_audio_ctx, state))
        self.blocks = nn.ModuleList(
            [ResidualAttentionBlock(state, dims.n_audio_head) for _ in range(dims.n_audio_layer)]
        )
        self.ln_post = LayerNorm(state)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).permute(0, 2, 1)
        assert x.shape[1:] == self.positional_embedding.shape, "incorrect audio shape"
        x = (x + self.positional_embedding).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


class TextDecoder(nn.Module):
    def __init__(self, dims: ModelDimensions) -> None:
        super().__init__()
        state = dims.n_text_state
        self.token_embedding = nn.Embedding(dims.n_vocab, state)
        self.positional_embedding = nn.Parameter(torch.randn(dims.n_text_ctx, state) * 0.01)
        self.blocks = nn.ModuleList(
            [ResidualAttentionBlock(state, dims.n_text_head, cross_attention=True) for _ in range(dims.n_text_layer)]
        )
        self.ln = LayerNorm(state)
        mask = torch.empty(dims.n_text_ctx, dims.n_text_ctx).fill_(-np.inf).triu_(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor, xa: Tensor, kv_cache: dict | None = None) -> Tensor:
        offset = next(iter(kv_cache.values())).shape[1] if kv_cache else 0
        x = self.token_embedding(x) + self.positional_embedding[offset : offset + x.shape[-1]]
        x = x.to(xa.dtype)
        for block in self.blocks:
            x = block(x, xa, mask=self.mask, kv_cache=kv_cache)
        x = self.ln(x)
        return (x @ torch.transpose(self.token_embedding.weight.to(x.dtype), 0, 1)).float()


class Speech(nn.Module):
    def __init__(self, dims: ModelDimensions, sparse: bool) -> None:
        super().__init__()
        self.dims = dims
        self.encoder, self.decoder = AudioEncoder(dims), TextDecoder(dims)
        all_heads = torch.zeros(dims.n_text_layer, dims.n_text_head, dtype=torch.bool)
        all_heads[dims.n_text_layer // 2 :] = True
        self.register_buffer("alignment_heads", all_heads.to_sparse() if sparse else all_heads, persistent=False)

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        return self.decoder(tokens, self.encoder(mel))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def build(sparse: bool = True, layers: int = 2) -> Speech:
    return Speech(ModelDimensions(n_audio_layer=layers, n_text_layer=layers), sparse)


class Recordings(torch.utils.data.Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    def __init__(self, samples: int, length: int) -> None:
        generator = torch.Generator().manual_seed(8)
        self.mel = torch.randn(samples, 5, 14, generator=generator)
        self.tokens = torch.randint(0, 23, (samples, length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.mel)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return (self.mel[index], self.tokens[index, :-1]), self.tokens[index, 1:]


def data(samples: int = 24, length: int = 6) -> Recordings:
    return Recordings(samples, length)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
