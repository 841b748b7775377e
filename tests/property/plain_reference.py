"""What a drawn request must equal: a plain PyTorch loop over the whole model. It imports nothing of the runner.

What it takes as a promise of the runner it states again: a step takes the next samples in order; a replica gets one
part of them, and a micro-batch one part of these; losses and gradients are summed in the order of micro-batches and
replicas and divided once; the generators are seeded by step, micro-batch and layer.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Late:
    """Weights that are late: windows overlap, and a forward reads the weights before updates that it does not wait for.

    Args:
        lags: for each weight, the micro-batches by which its updates come late.
        newest: whether a backward reads the newest weights instead of those of its forward.
        ended_every: after so many steps all windows end before the next begins, whose forwards then read the newest
            weights, as nothing else is kept; None: never.
    """

    lags: Mapping[str, int]
    newest: bool = False
    ended_every: int | None = None


@dataclass(frozen=True)
class Task:
    """A whole training run in plain values.

    Args:
        model: makes the model of layers; it draws from seeded generators.
        loss: of an output and a target: the mean over samples, or ``(sum, weight)``.
        batch: the samples of a step.
        splits: for each step, the number of replicas, and of micro-batches of each or the share of each.
        optimizer: makes it, over the trained weights, or over fp32 copies of them with ``masters``.
        rate: the learning rate of a step.
        dtype: of weights and inputs.
        autocast: of matrix products, or None.
        scale: the first factor on the mean loss, of which gradients are taken; None: they are its own. A sum is divided
            by the power of two below its weight in the first step, before which it is taken to be the samples.
        frozen: patterns of the names of weights that are not trained.
        late: for schedules whose windows overlap.
    """

    model: Callable[[], nn.Sequential]
    loss: Loss
    inputs: Tensor
    targets: Tensor
    batch: int
    splits: Sequence[tuple[int, int | Sequence[float]]]
    optimizer: Callable[[list[Tensor]], Optimizer]
    rate: Callable[[int], float]
    seed: int = 0
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    masters: bool = False
    scale: float | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    frozen: Sequence[str] = ()
    late: Late | None = None


@dataclass
class Result:
    """The losses, the gradients of each step as an optimizer gets them, the weights and buffers at the end, and the
    trained weights before the first step.

    A step that is skipped has no gradients. A weight with several names has the first of them.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    begins: dict[str, Tensor] = field(default_factory=dict)


def mixed(*parts: int | str) -> int:
    """A seed of 63 bits from several parts: splitmix64's finaliser after each of them."""
    state, ones = 0x9E3779B97F4A7C15, (1 << 64) - 1
    for part in parts:
        state ^= zlib.crc32(part.encode()) if isinstance(part, str) else part & ones
        state = state * 0xBF58476D1CE4E5B9 & ones
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & ones
        state ^= state >> 31
    return state & (ones >> 1)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def ends_of(samples: int, count: int | Sequence[float]) -> int | list[int]:
    """Where a replica's micro-batches end but the last, if they have shares; else their number."""
    if isinstance(count, int):
        return count
    sums = [sum((Decimal(str(each)) for each in count[:end]), Decimal(0)) for end in range(1, len(count) + 1)]
    return [int((samples * each / sums[-1]).quantize(Decimal(1), ROUND_HALF_UP)) for each in sums[:-1]]


class _Training:
    def __init__(self, task: Task) -> None:
        self.task = task
        seed_all(task.seed)
        self.model = task.model().to(task.dtype)
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        for parameter, own in names.items():
            parameter.requires_grad_(not any(fnmatchcase(name, each) for name in own for each in task.frozen))
        self.trained = {own[0]: parameter for parameter, own in names.items() if parameter.requires_grad}
        self.updated = {
            name: nn.Parameter(weight.detach().float().clone()) if task.masters else weight
            for name, weight in self.trained.items()
        }
        self.optimizer = task.optimizer(list(self.updated.values()))
        self.buffers = list(self.model.buffers())
        self.buffers_of = [[each.clone() for each in self.buffers]]
        self.kept = [self.snapshot()]
        self.scale = task.scale
        self.weight = float(task.batch)  # of a step, once it is known

    def snapshot(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.trained.items()}

    def batches(self) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
        """For each step, the micro-batches of each replica, each replica's in memory of its own."""
        task, samples = self.task, self.samples()
        for replicas, count in task.splits:
            own = next(samples)
            parts = (value[own].tensor_split(replicas) for value in (task.inputs, task.targets))
            yield [
                list(zip(*(part.clone().tensor_split(ends_of(len(part), count)) for part in replica), strict=True))
                for replica in zip(*parts, strict=True)
            ]

    def samples(self) -> Iterator[Tensor]:
        """The numbers of each step's samples: each epoch has an order of its own, and its last step what is left."""
        epoch = 0
        while True:
            generator = torch.Generator().manual_seed(mixed(self.task.seed, epoch))
            order = torch.randperm(len(self.task.inputs), generator=generator)
            yield from torch.split(order, self.task.batch)
            epoch += 1

    def forward(self, value: Any, step: int, number: int) -> Any:
        task = self.task
        with torch.autocast("cpu", task.autocast, enabled=task.autocast is not None):
            value = value.to(task.dtype) if value.is_floating_point() else value
            for place, layer in enumerate(self.model._modules.values()):
                seed_all(mixed(task.seed, step, number, place))
                assert layer is not None
                value = layer(value)
        return _in_fp32(value)

    def replica(self, number: int, microbatches: Sequence[tuple[Tensor, Tensor]], step: int) -> tuple[float, float]:
        """Add up the losses and weights of a replica's micro-batches; their gradients are in the model's."""
        self.model.zero_grad()
        self._use_buffers(number)
        count, factor = len(microbatches), self.factor
        total = whole = 0.0
        for own, (inputs, targets) in enumerate(microbatches):
            if not len(inputs):
                continue
            with self.reading(step, own, count) as before_backward:
                made = self.task.loss(self.forward(inputs, step, number * count + own), targets)
                part, weight = made if isinstance(made, tuple) else (made * len(inputs), len(inputs))
                before_backward()
                (part * factor).backward()
            total, whole = total + float(part.detach().double()), whole + float(weight)
        self.buffers_of[number] = [each.clone() for each in self.buffers]
        return total, whole

    @contextmanager
    def reading(self, step: int, own: int, count: int) -> Iterator[Callable[[], None]]:
        """Within it, the model has the weights that a micro-batch reads."""
        late = self.task.late
        if late is None:
            yield lambda: None
            return
        newest = {name: weight.data for name, weight in self.trained.items()}
        ended = 0 if late.ended_every is None else step - step % late.ended_every
        for name, weight in self.trained.items():
            version = max(ended, (step * count + own - late.lags[name]) // count)
            weight.data = self.kept[version][name].clone()

        @torch.no_grad()
        def before_backward() -> None:
            for name, weight in self.trained.items() if late.newest else ():
                weight.data.copy_(newest[name])

        yield before_backward
        for name, weight in self.trained.items():
            weight.data = newest[name]

    @property
    def factor(self) -> float:
        """The factor on a step's summed loss."""
        return 1.0 if self.scale is None else self.scale / 2.0 ** math.floor(math.log2(self.weight))

    @torch.no_grad()
    def _use_buffers(self, replica: int) -> None:
        """Put a replica's buffers into the model."""
        for buffer, own in zip(self.buffers, self.buffers_of[replica], strict=True):
            buffer.copy_(own)

    def step(self, number: int, replicas: Sequence[Sequence[tuple[Tensor, Tensor]]], result: Result) -> None:
        task, totals, gradients = self.task, [], []
        while len(self.buffers_of) < len(replicas):  # one that is new begins with those of the first
            self.buffers_of.append([each.clone() for each in self.buffers_of[0]])
        for replica, microbatches in enumerate(replicas):
            totals.append(self.replica(replica, microbatches, number))
            gradients.append([weight.grad for weight in self.trained.values()])
        total, whole = (sum(part) for part in zip(*totals, strict=True))
        for place, name in enumerate(self.trained):
            found = [each for part in gradients if (each := part[place]) is not None]
            gradient = sum(found[1:], found[0]) if found else None
            self.trained[name].grad = None
            self.updated[name].grad = None if gradient is None else gradient.to(self.updated[name].dtype)
        given = [each.grad for each in self.updated.values() if each.grad is not None]
        finite = math.isfinite(total) and all(bool(each.isfinite().all()) for each in given)
        _divide_and_clip(task, given if finite else (), whole * self.factor)
        own = {name: each.grad.clone() for name, each in self.updated.items() if each.grad is not None}
        if number == 0:
            self.weight = max(1.0, whole)
        if finite:
            self.update(number)
        elif self.scale is not None:
            self.scale /= 2
        self.kept.append(self.snapshot())
        result.losses.append(total / whole)
        result.gradients.append(own if finite or self.scale is None else {})

    def update(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate(number)
        seed_all(mixed(self.task.seed, number, "update"))
        self.optimizer.step()
        if self.task.masters:
            with torch.no_grad():
                for name, weight in self.trained.items():
                    weight.copy_(self.updated[name])


def _in_fp32(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_in_fp32, value))
    return value.float() if value.is_floating_point() else value


def _divide_and_clip(task: Task, gradients: Sequence[Tensor], divisor: float) -> None:
    for gradient in gradients:
        gradient.div_(divisor)
        if task.clip_value is not None:
            gradient.clamp_(-task.clip_value, task.clip_value)
    if task.clip_norm is not None:
        norm = math.sqrt(math.fsum(float(gradient.double().pow(2).sum()) for gradient in gradients))
        factor = min(1.0, task.clip_norm / (norm + 1e-6))
        for gradient in gradients if factor < 1.0 else ():
            gradient.mul_(factor)


def train(task: Task) -> Result:
    """Train in one process, with random generators as they were before afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        training = _Training(task)
        result = Result(begins=training.kept[0])
        for number, replicas in enumerate(training.batches()):
            training.step(number, replicas, result)
        training._use_buffers(0)
        state = training.model.state_dict(keep_vars=True)  # a weight with several names stands under the first alone
        first = {id(value): name for name, value in reversed(state.items())}
        result.weights = {name: state[name].detach().clone() for name in first.values()}
        return result
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def rate_of(name: str, peak: float, low: float, warmup: int, total: int) -> Callable[[int], float]:
    """The learning rate of each step: linear to the peak, then down a line or a cosine."""

    def rate(step: int) -> float:
        if name == "constant":
            return peak
        if step < warmup:
            part = (step + 1) / warmup
            if name == "warmup_decay" and warmup > 1:
                part = math.log(step + 1) / math.log(warmup)
        else:
            part = max(0.0, (total - step) / max(1, total - warmup))
            part = (1 - math.cos(math.pi * part)) / 2 if name == "cosine" else part
        return low + (peak - low) * part

    return rate
