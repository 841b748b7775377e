"""1-bit Adam beside Adam over three seeds: two replicas of a small GPT, the same samples and steps."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from runner.config.schema import OptimizerConfig
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.update.replicas import ReplicaExchange
from runner.optim.compression import signs
from runner.optim.kinds.build import build_optimizer
from runner.optim.kinds.onebit import OneBitOptimizer
from runner.zoo import gpt
from runner.zoo.data import random_tokens

SEEDS, STEPS, LAST, BATCH, REPLICAS = (0, 1, 2), 200, 20, 16, 2
FREEZE = 60
SHARED = {"lr": 3e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}
LIMIT = 1.0
"""The most that 1-bit Adam may lose against Adam, as a multiple of the spread of Adam's losses over the seeds."""


def last_loss(name: str, seed: int) -> float:
    """The mean loss of the last steps of a training."""
    samples = random_tokens(samples=BATCH * STEPS, val_samples=1, sequence_length=32, vocab_size=64, seed=0)[0]
    inputs, targets = samples.tensors
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed)).view(STEPS, REPLICAS, -1)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 64, "sequence_length": 32, "width": 64, "layers": 2}
    sizes |= {"heads": 4, "dropout": 0.0}
    state = nn.Sequential(*(make() for make in gpt.build(**sizes).layers())).state_dict()

    def run(transport: ThreadTransport) -> list[float]:
        model = nn.Sequential(*(make() for make in gpt.build(**sizes).layers()))
        model.load_state_dict(state)
        parameters = list(model.parameters())
        freeze = {"freeze_step": FREEZE} if name == "onebit_adam" else {}
        optimizer = build_optimizer(OptimizerConfig(name=name, **SHARED, **freeze), parameters)  # type: ignore[arg-type]
        if isinstance(optimizer, OneBitOptimizer):
            optimizer.attach(ReplicaExchange(transport, tuple(range(REPLICAS))))
        losses = []
        for step in range(STEPS):
            chosen = order[step, transport.rank]
            loss = functional.cross_entropy(model(inputs[chosen]).flatten(0, 1), targets[chosen].flatten())
            optimizer.zero_grad()
            (loss / REPLICAS).backward()  # type: ignore[no-untyped-call]  # torch's
            if not (isinstance(optimizer, OneBitOptimizer) and optimizer.compresses):
                for parameter in parameters:
                    assert parameter.grad is not None
                    transport.all_reduce(parameter.grad, tuple(range(REPLICAS))).wait()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    return fmean(fmean(losses[-LAST:]) for losses in run_ranks(REPLICAS, run))


@pytest.mark.full
def test_onebit_adam_loses_no_more_than_the_spread_of_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale per 1024 elements, which is the option's, and with the paper's, one per tensor."""
    adam = [last_loss("adam", seed) for seed in SEEDS]
    spread = max(adam) - min(adam)
    blocks = [last_loss("onebit_adam", seed) for seed in SEEDS]
    monkeypatch.setattr(signs, "_BLOCK_SIZE", 1 << 40)
    tensors = [last_loss("onebit_adam", seed) for seed in SEEDS]
    lost, published = (fmean(each) - fmean(adam) for each in (blocks, tensors))
    print(f"Adam {adam}, spread {spread:.4f}; 1-bit {blocks}, with a scale per tensor {tensors}")
    print(f"in spreads: lost {lost / spread:.2f}, with a scale per tensor {published / spread:.2f}")
    assert lost <= LIMIT * spread, (adam, blocks)
    assert lost <= published + spread, (blocks, tensors)
