# mypy: ignore-errors
"""A small decoder in the manner of a collection of models: sizes by a config, rotary tables as buffers that are made
again when the longest sequence is set, a cache of keys and values for generation, blocks in a ModuleDict.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Config:
    name: str = "small"
    block_size: int = 16
    vocab_size: int = 30
    padding_multiple: int = 8
    padded_vocab_size: int | None = None
    n_layer: int = 3
    n_head: int = 4
    n_query_groups: int = 2
    n_embd: int = 16
    head_size: int | None = None
    rotary_percentage: float = 0.5
    intermediate_size: int = 24
    norm_eps: float = 1e-5
    rope_base: int = 10000
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.head_size = self.head_size or self.n_embd // self.n_head
        more = -self.vocab_size % self.padding_multiple
        self.padded_vocab_size = self.padded_vocab_size or self.vocab_size + more
        self.rope_n_elem = int(self.rotary_percentage * self.head_size)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        normed = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.eps)
        return normed.to(dtype=dtype) * self.weight

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def build_rope_cache(seq_len: int, n_elem: int, base: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    theta = 1.0 / (base ** (torch.arange(0, n_elem, 2, device=device).float() / n_elem))
    idx_theta = torch.outer(torch.arange(seq_len, device=device).float(), theta).repeat(1, 2)
    return torch.cos(idx_theta), torch.sin(idx_theta)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + rotated * sin).to(dtype=x.dtype)


class KVCache(nn.Module):
    def __init__(self, k_shape: tuple[int, ...], v_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(k_shape), persistent=False)
        self.register_buffer("v", torch.zeros(v_shape), persistent=False)

    def forward(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.k.index_copy_(2, input_pos, k), self.v.index_copy_(2, input_pos, v)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        size = (config.n_head + 2 * config.n_query_groups) * config.head_size
        self.qkv = nn.Linear(config.n_embd, size, bias=False)
        self.proj = nn.Linear(config.head_size * config.n_head, config.n_embd, bias=False)
        self.kv_cache: KVCache | None = None
        self.config = config

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, input_pos: Tensor | None) -> Tensor:
        config, (B, T, _) = self.config, x.size()
        per_group = config.n_head // config.n_query_groups
        qkv = self.qkv(x).view(B, T, config.n_query_groups, per_group + 2, config.head_size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((per_group, 1, 1), dim=2)
        q = q.reshape(B, -1, T, config.head_size)
        k = k.expand(B, config.n_query_groups, per_group, T, config.head_size).reshape(B, -1, T, config.head_size)
        v = v.expand(B, config.n_query_groups, per_group, T, config.head_size).reshape(B, -1, T, config.head_size)
        n = config.rope_n_elem
        q = torch.cat((apply_rope(q[..., :n], cos, sin), q[..., n:]), dim=-1)
        k = torch.cat((apply_rope(k[..., :n], cos, sin), k[..., n:]), dim=-1)
        if input_pos is not None:
            if not isinstance(self.kv_cache, KVCache):
                raise TypeError("call set_kv_cache() first")
            k, v = self.kv_cache(input_pos, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=mask is None)
        return self.proj(y.transpose(1, 2).reshape(B, T, config.head_size * config.n_head))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.fc_2 = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1, self.attn = RMSNorm(config.n_embd, config.norm_eps), Attention(config)
        self.norm_2, self.mlp = RMSNorm(config.n_embd, config.norm_eps), MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, input_pos: Tensor | None = None
    ) -> Tensor:
        x = x + self.attn(self.norm_1(x), cos, sin, mask, input_pos)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.padded_vocab_size is not None
        self.config = config
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": RMSNorm(config.n_embd, config.norm_eps),
            }
        )
        self.mask_cache: Tensor | None = None
        self.max_seq_length = config.block_size

    @property
    def max_seq_length(self) -> int:
        return self._max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        if value > self.config.block_size:
            raise ValueError(f"{value} is more than {self.config.block_size}")
        self._max_seq_length = value
        if not hasattr(self, "cos"):
            cos, sin = self.rope_cache()
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        elif value != self.cos.size(0):
            self.cos, self.sin = self.rope_cache(device=self.cos.device)

    def rope_cache(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        return build_rope_cache(self.max_seq_length, self.config.rope_n_elem, self.config.rope_base, device)

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        T = idx.size(1)
        if self.max_seq_length < T:
            raise ValueError(f"a sequence of {T} is longer than {self.max_seq_length}")
        if input_pos is not None:
            cos, sin = self.cos.index_select(0, input_pos), self.sin.index_select(0, input_pos)
            assert self.mask_cache is not None
            mask = self.mask_cache.index_select(2, input_pos)
        else:
            cos, sin, mask = self.cos[:T], self.sin[:T], None
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:
            x = block(x, cos, sin, mask, input_pos)
        return self.lm_head(self.transformer["ln_f"](x))

    def set_kv_cache(self, batch_size: int) -> None:
        shape = (batch_size, self.config.n_head, self.max_seq_length, self.config.head_size)
        for block in self.transformer["h"]:
            block.attn.kv_cache = KVCache(shape, shape)
        full = torch.ones(self.max_seq_length, self.max_seq_length, dtype=torch.bool)
        self.mask_cache = torch.tril(full)[None, None]


def build(max_seq_length: int = 10, **sizes: int) -> GPT:
    model = GPT(Config(**sizes))
    model.max_seq_length = max_seq_length
    return model


def data(samples: int = 24, length: int = 9) -> torch.utils.data.TensorDataset:
    tokens = torch.randint(0, 30, (samples, length + 1), generator=torch.Generator().manual_seed(4))
    return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))
