"""Loss against delay: the recurrence of PipeDream in one process, for several optimizers and depths.

With D stages and one micro-batch per step, the gradient of stage s is taken at weights that lack its last D - 1 - s
steps. The model is the same at every depth: sixteen blocks, in D stages of 16 / D blocks each. So depth changes the
delays alone; depth 1 is training without delay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Muon, Optimizer

from runner.recipes.asynchronous.model import VOCABULARY, Batches, make_blocks

__all__ = ["DEPTHS", "OPTIMIZERS", "Outcome", "train"]

BLOCKS = 16
DEPTHS = (1, 2, 4, 8, 16)
_LAST = 20  # the loss is the mean of so many last steps
_DIVERGED = 20.0

Make = Callable[[nn.Module, float], list[Optimizer]]


def _sgd(model: nn.Module, rate: float) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=rate, momentum=0.9)]


def _adamw(model: nn.Module, rate: float) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def _matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """All matrices but the embedding of tokens and the last one, and all else."""
    outer = {
        id(model.get_parameter(name)) for name, _ in model.named_parameters() if "tokens" in name or "words" in name
    }
    matrices = [each for each in model.parameters() if each.dim() == 2 and id(each) not in outer]
    chosen = {id(each) for each in matrices}
    return matrices, [each for each in model.parameters() if id(each) not in chosen]


def _muon(model: nn.Module, rate: float) -> list[Optimizer]:
    """Muon for all matrices but the first and the last, AdamW for all else, at one rate."""
    matrices, others = _matrices(model)
    return [
        Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _rotated(model: nn.Module, rate: float) -> list[Optimizer]:
    """Adam in bases that are renewed every ten steps, for the same matrices, and AdamW for all else, at one rate.

    SOAP is the published rotation of both sides by covariances of gradients (arXiv 2602.03515), except that its first
    step only begins the covariances.
    """
    from pytorch_optimizer import SOAP

    matrices, others = _matrices(model)
    rotated = SOAP(matrices, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, precondition_frequency=10)
    return [rotated, AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


OPTIMIZERS: dict[str, tuple[Make, Sequence[float]]] = {
    "SGD, momentum 0.9": (_sgd, (0.01, 0.03, 0.1)),
    "AdamW": (_adamw, (0.001, 0.003, 0.01)),
    "Muon": (_muon, (0.001, 0.003, 0.01)),
    "AdamW, rotated bases": (_rotated, (0.001, 0.003, 0.01)),
}
"""The optimizers with the learning rates among which the best is taken, for each depth anew."""


@dataclass(frozen=True)
class Outcome:
    """The result of one training run.

    Args:
        optimizer, depth, rate: what was trained.
        loss: mean loss of the last twenty steps; infinite if it diverged.
        curve: the loss of each step.
    """

    optimizer: str
    depth: int
    rate: float
    loss: float
    curve: list[float]

    def as_json(self) -> dict[str, str | float | None]:
        """What is kept of it; a loss that is infinite is None."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"optimizer": self.optimizer, "depth": self.depth, "rate": self.rate, "loss": loss}


def train(name: str, depth: int, rate: float, *, steps: int, samples: int, seed: int = 0) -> Outcome:
    """Train with the delays of PipeDream, with one micro-batch per step.

    Args:
        name: one of :data:`OPTIMIZERS`.
        depth: D, a divisor of the number of blocks.
        rate: the learning rate.
        steps, samples, seed: number of steps, samples of each, and the seed of weights and samples.
    """
    model = make_blocks(BLOCKS, seed)
    optimizers = OPTIMIZERS[name][0](model, rate)
    stages = [list(model[at : at + BLOCKS // depth].parameters()) for at in range(0, BLOCKS, BLOCKS // depth)]
    kept = [deque([_copied(stage)], maxlen=depth - number) for number, stage in enumerate(stages)]
    curve: list[float] = []
    for _, (tokens, following) in zip(range(steps), Batches(samples, seed), strict=False):
        newest = [[parameter.data for parameter in stage] for stage in stages]
        for stage, versions in zip(stages, kept, strict=True):
            _set(stage, versions[0])
        loss = functional.cross_entropy(model(tokens).view(-1, VOCABULARY), following.reshape(-1))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        for stage, values in zip(stages, newest, strict=True):
            _set(stage, values)
        for optimizer in optimizers:
            optimizer.step()
        for stage, versions in zip(stages, kept, strict=True):
            versions.append(_copied(stage))
        curve.append(float(loss.detach()))
        if not curve[-1] < _DIVERGED:
            return Outcome(name, depth, rate, float("inf"), curve)
    return Outcome(name, depth, rate, sum(curve[-_LAST:]) / len(curve[-_LAST:]), curve)


def _copied(stage: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in stage]


def _set(stage: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(stage, values, strict=True):
        parameter.data = value
