"""What is trained: one GPT, cut into layers whose weights do not depend on who builds them, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.model.layers import layers_of
from runner.zoo.data import random_tokens
from runner.zoo.gpt import build

__all__ = ["Batch", "GptSize", "cross_entropy", "gpt_batches", "gpt_layers", "make_adamw"]

Batch = tuple[Tensor, Tensor]

make_adamw: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)


@dataclass(frozen=True)
class GptSize:
    """Arguments of ``model=gpt``."""

    layers: int = 8
    width: int = 256
    sequence_length: int = 128
    vocab_size: int = 512
    heads: int = 8

    def kwargs(self) -> dict[str, Any]:
        return asdict(self)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean over all tokens in fp32 nats; output [samples, tokens, classes]."""
    return functional.cross_entropy(output.flatten(0, -2).float(), target.flatten())


def gpt_layers(size: GptSize, seed: int) -> list[nn.Module]:
    """Embedding, blocks and head, as ``runner train seed=<seed>`` makes them."""
    return [source.build() for source in layers_of(build(**size.kwargs()), seed)]


def gpt_batches(size: GptSize, samples: int, steps: int) -> list[Batch]:
    """``steps`` batches of ``samples`` sequences: those of ``data=random_tokens data.shuffle=false``."""
    data, _ = random_tokens(steps * samples, samples, size.sequence_length, size.vocab_size)
    inputs, targets = data.tensors
    return list(zip(inputs.tensor_split(steps), targets.tensor_split(steps), strict=True))
