"""Generated data sets in which there is something to learn; equal on every rank for the same seed."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

__all__ = ["random_regression", "random_tokens"]

_SUCCESSORS = 4  # likely next tokens of each token: the best possible loss is about ln 4


def random_tokens(
    samples: int, val_samples: int, sequence_length: int, vocab_size: int, seed: int = 0
) -> tuple[TensorDataset, TensorDataset]:
    """Walks of a random Markov chain, in which each token has four equally likely successors.

    Args:
        samples, val_samples: number of sequences for training and for validation.
        sequence_length: tokens of the input, and of the target, which is the input shifted by one token.
        vocab_size: number of token ids.
        seed: seed of the chain and the walks.

    Returns:
        train and val: data sets of (input [seq], target [seq]), both int64.
    """
    inputs, targets = _walks(samples + val_samples, sequence_length, vocab_size, seed)
    return _split(inputs, targets, samples)


@lru_cache(maxsize=1)  # a plan asks for samples of the same data many times
def _walks(total: int, sequence_length: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    successors = torch.randint(vocab_size, (vocab_size, _SUCCESSORS), generator=generator)
    token = torch.randint(vocab_size, (total,), generator=generator)
    choices = torch.randint(_SUCCESSORS, (sequence_length, total), generator=generator)
    walk = [token]
    for choice in choices:
        walk.append(successors[walk[-1], choice])
    tokens = torch.stack(walk, dim=1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def random_regression(
    samples: int, val_samples: int, inputs: int, outputs: int, seed: int = 0, noise: float = 0.01
) -> tuple[TensorDataset, TensorDataset]:
    """Normal inputs, and as targets the output of a fixed random two-layer network plus noise.

    Args:
        samples, val_samples: number of rows for training and for validation.
        inputs, outputs: features of an input and of a target.
        seed: seed of the network, the inputs and the noise.
        noise: standard deviation added to the targets.

    Returns:
        train and val: data sets of (input [inputs], target [outputs]), both float32.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = 2 * inputs
    first = torch.randn(inputs, hidden, generator=generator) / inputs**0.5
    second = torch.randn(hidden, outputs, generator=generator) / hidden**0.5
    features = torch.randn(samples + val_samples, inputs, generator=generator)
    targets = torch.tanh(features @ first) @ second
    targets = targets + noise * torch.randn(targets.shape, generator=generator)
    return _split(features, targets, samples)


def _split(inputs: Tensor, targets: Tensor, samples: int) -> tuple[TensorDataset, TensorDataset]:
    return (
        TensorDataset(inputs[:samples].clone(), targets[:samples].clone()),  # which whoever asks for them may change
        TensorDataset(inputs[samples:].clone(), targets[samples:].clone()),
    )
