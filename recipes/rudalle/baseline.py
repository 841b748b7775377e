"""The recipe as a plain PyTorch loop in one process: what ``runner train`` is compared with.

``python -m runner.recipes.rudalle.baseline`` trains and prints a line per 110 steps and a line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from runner.recipes.rudalle.data import build
from runner.recipes.rudalle.loss import weighted_cross_entropy
from runner.recipes.rudalle.metrics import Validation, validate
from runner.recipes.rudalle.model import assemble

__all__ = ["Result", "learning_rate", "main", "train"]

_CONF = Path(__file__).parents[2] / "conf"
_MAX_LR, _MIN_LR, _WARMUP = 5e-3, 1e-5, 55
_VALIDATE_EVERY = 110


@dataclass(frozen=True)
class Result:
    """The trained model, training losses per step, validations by step, and seconds per step (median)."""

    model: nn.Sequential
    losses: list[float]
    validations: dict[int, Validation]
    step_seconds: float


def learning_rate(step: int, total: int) -> float:
    """DeepSpeed's WarmupDecayLR: up with the logarithm of the step, then linearly down to the least."""
    rise = math.log(step + 1) / math.log(_WARMUP)
    fall = (total - step) / (total - _WARMUP)
    share = rise if step < _WARMUP else fall
    return _MIN_LR + (_MAX_LR - _MIN_LR) * share


def train(
    steps: int = 550, batch: int = 24, seed: int = 0, report: Callable[[str], None] = lambda line: None, **model: Any
) -> Result:
    """Train the tiny model; ``model`` overrides its arguments."""
    train_set, val_set = build(**_kwargs("data/emoji"))
    torch.manual_seed(seed)
    net = assemble(**{**_kwargs("model/rudalle_tiny"), **model})
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    inputs, targets = train_set.tensors
    losses, seconds, validations = [], [], {}
    for step, chosen in enumerate(_batches(len(inputs), steps, batch, seed)):
        start = time.perf_counter()
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        loss = weighted_cross_entropy(net(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if (step + 1) % _VALIDATE_EVERY == 0 or step + 1 == steps:
            validations[step + 1] = validate(net, val_set)
            report(f"step {step + 1}: train {losses[-1]:.3f}, valid image {validations[step + 1].image:.3f}")
    return Result(net, losses, validations, sorted(seconds)[len(seconds) // 2])


def main() -> None:
    """Train with one thread and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=550)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = train(arguments.steps, seed=arguments.seed, report=print)
    last = {key: round(value, 4) for key, value in asdict(result.validations[arguments.steps]).items()}
    recent = result.losses[-110:]
    summary = {**last, "train_last_110": round(sum(recent) / len(recent), 4), "step_seconds": result.step_seconds}
    print(json.dumps(summary))


def _kwargs(option: str) -> dict[str, Any]:
    kwargs = OmegaConf.to_container(OmegaConf.load(_CONF / f"{option}.yaml").kwargs)
    assert isinstance(kwargs, dict)
    return {str(key): value for key, value in kwargs.items()}


def _batches(num_samples: int, steps: int, batch: int, seed: int) -> list[Tensor]:
    """Indices per step: one shuffled epoch after another, cut without regard to where epochs end."""
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(steps * batch / num_samples)
    order = torch.cat([torch.randperm(num_samples, generator=generator) for _ in range(epochs)])
    return list(torch.split(order[: steps * batch], batch))


if __name__ == "__main__":
    main()
