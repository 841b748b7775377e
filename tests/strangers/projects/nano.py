# mypy: ignore-errors
"""A small language model in one file: a dataclass of sizes, one tied table, logits and loss from the same forward.

Tokens lie in a file of unsigned 16-bit numbers, of which a batch takes rows at random places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 12
    vocab_size: int = 29
    n_layer: int = 3
    n_head: int = 2
    n_embd: int = 16
    dropout: float = 0.0
    bias: bool = True


class LayerNorm(nn.Module):
    """As torch's, with a bias that may be left out."""

    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout, self.n_head, self.n_embd = config.dropout, config.n_head, config.n_embd
        self.flash = hasattr(F, "scaled_dot_product_attention")

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = LayerNorm(config.n_embd, config.bias), LayerNorm(config.n_embd, config.bias)
        self.attn = CausalSelfAttention(config)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias),
                "c_proj": nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias),
                "dropout": nn.Dropout(config.dropout),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        inner = F.gelu(self.mlp["c_fc"](self.ln_2(x)))
        return x + self.mlp["dropout"](self.mlp["c_proj"](inner))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": LayerNorm(config.n_embd, config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))
        print(f"number of parameters: {self.get_num_params() / 1e6:.4f}M")

    def get_num_params(self, non_embedding: bool = True) -> int:
        total = sum(parameter.numel() for parameter in self.parameters())
        return total - self.transformer["wpe"].weight.numel() if non_embedding else total

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= self.config.block_size, f"a sequence of {t} is longer than {self.config.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](pos))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def build(n_layer: int = 3, n_embd: int = 16) -> GPT:
    return GPT(GPTConfig(n_layer=n_layer, n_embd=n_embd))


class Rows(torch.utils.data.Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Rows of a file of tokens; the model gets its targets, too, because its forward computes the loss."""

    def __init__(self, file: str, block_size: int, samples: int) -> None:
        self.data = np.memmap(file, dtype=np.uint16, mode="r")
        places = torch.randint(len(self.data) - block_size, (samples,), generator=torch.Generator().manual_seed(3))
        self.places, self.block_size = places.tolist(), block_size

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        at = self.places[index]
        x, y = (torch.from_numpy(self.data[first : first + self.block_size].astype(np.int64)) for first in (at, at + 1))
        return {"idx": x, "targets": y}, y


def data(folder: str, block_size: int = 12, samples: int = 24) -> Rows:
    file = Path(folder) / "train.bin"
    if not file.exists():
        np.random.default_rng(5).integers(0, 29, 400).astype(np.uint16).tofile(file)
    return Rows(str(file), block_size, samples)


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return output[1]
