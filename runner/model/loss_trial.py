"""Tries a loss on samples of the run: what it gives for all of them at once must be what their parts give together.

A step's loss is Σ sum / Σ weight over micro-batches and replicas, and so are its gradients. A mean over tokens of which
some do not count, a sum, or a comparison of the samples of a batch with one another is no such thing: it would train
another model in every layout, without a word. So the value and its gradient by the output are compared for several cuts
of the samples, whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from runner.config.schema import RunConfig
from runner.errors import Problem, RunnerError
from runner.model.load import LoadedModel
from runner.model.loss_value import Evaluate, Value
from runner.model.seeds import seeded_with

__all__ = ["Tried", "num_parts", "trial_problems", "tried_of"]

_VALUE, _GRADIENT = 3e-6, 1e-5  # relative, of fp32
_NOISE = 16.0  # times the difference that another order of the samples makes
_MOST_ALONE = 16  # samples that are tried one by one
_DRAWS, _STANDARD_ERRORS, _CLEAR = 12, 8.0, 0.05  # of a loss that draws random numbers


@dataclass(frozen=True)
class Tried:
    """A loss, and how problems name it.

    Args:
        loss: the loss function; None if a model computes it itself.
        path, target: the field that names it, and its value.
        returns: what to return in place of a mean that is none over samples.
        rule: what it must return.
    """

    loss: Any
    path: str
    target: str
    returns: str = "return (sum, weight)"
    rule: str = "must return a mean over samples, or (sum, weight)"

    @property
    def is_shipped(self) -> bool:
        """Whether it is the runner's own, which is known to be the same for every cut of a batch."""
        return self.target.startswith("runner.")

    def problem(self, rule: str, why: str, fix: str = "") -> Problem:
        return Problem(self.path, self.target, rule, why, fix)


def tried_of(config: RunConfig, model: LoadedModel) -> Tried:
    """How problems name the loss of a model."""
    if model.step is not None:
        kind = type(model.module).__name__
        returns = f'return {{"loss": loss, "weight": count}} from {kind}.training_step'
        rule = "must return a mean over samples, or beside it the weight that it is over"
        return Tried(None, "model.target", f"{config.model.target} ({kind}.training_step)", returns, rule)
    if model.module is not None and callable(getattr(model.module, "loss", None)):
        kind = type(model.module).__name__
        return Tried(
            model.loss, "model.target", f"{config.model.target} ({kind}.loss)", f"return (sum, weight) from {kind}.loss"
        )
    return Tried(model.loss, "loss.target", config.loss.target)


def num_parts(config: RunConfig) -> int:
    """The number of micro-batches of a step over all replicas, none of which is empty."""
    parts = config.schedule.computed_microbatches * config.parallelism.data
    return min(parts, config.data.batch_size)


def trial_problems(tried: Tried, evaluate: Evaluate, samples: int, parts: int) -> list[Problem]:
    """The problems of a loss on the given samples; an empty list also where its value is not finite.

    Args:
        tried: names the loss.
        evaluate: evaluates it.
        samples: the number of samples.
        parts: the number of micro-batches of a step over all replicas. If it is 1, a loss may compare the samples of a
            batch with one another.

    Raises:
        RequestError: the loss returns neither a scalar nor a pair.
    """
    rows = range(samples)
    first, second = _value(evaluate, rows), _value(evaluate, rows)
    found = [*_weights_problems(tried, first, second), *_pair_problems(tried, first, evaluate, samples)]
    if not found and not _same(first, second):
        return [_changing(tried, first, second)]
    if not found and parts > 1 and samples > 1:
        found += _cut_problems(tried, evaluate, samples, parts)
        third = _value(evaluate, rows)
        if not _same(first, third):
            return [_changing(tried, first, third)]
    return found


def _weights_problems(tried: Tried, first: Value, second: Value) -> Iterator[Problem]:
    """A problem with weights that are not the model's; what a call makes to differentiate by is not there again."""
    inner = tried.loss.func if isinstance(tried.loss, partial) else tried.loss
    named = inner.named_parameters() if isinstance(inner, nn.Module) else ()
    own = [name for name, weight in named if weight.requires_grad]
    foreign = [each for each in first.foreign if any(each is other for other in second.foreign)]
    if own or foreign:
        names = ", ".join(own) or f"of shape {', '.join(str(tuple(each.shape)) for each in foreign)}"
        why = f"Its weights ({names}) are not the model's, and would not be trained"
        fix = "a last layer that has them and returns them beside its output; frozen ones need requires_grad_(False)"
        yield tried.problem("must have no weights of its own to train", why, fix)


def _changing(tried: Tried, first: Value, later: Value) -> Problem:
    why = (
        f"It gives {_said(first)} and later {_said(later)}: a state of its own is in no checkpoint and differs between "
        "ranks, and a generator of its own cannot be seeded"
    )
    return tried.problem("must give the same for the same output and target", why)


def _pair_problems(tried: Tried, whole: Value, evaluate: Evaluate, samples: int) -> Iterator[Problem]:
    """A pair of which the first is a mean, or the second no count: samples that come twice must double both."""
    if not whole.is_pair or not math.isfinite(whole.total):
        return
    found = _values(evaluate, [[*range(samples), *range(samples)]])
    for twice in found:
        is_mean = whole.total != 0.0 and math.isclose(twice.total, whole.total, rel_tol=1e-4)
        if is_mean or not math.isclose(twice.weight, 2 * whole.weight, rel_tol=1e-3):
            why = f"Of {samples} samples it gives {_said(whole)}, and of the same, each twice, {_said(twice)}"
            yield tried.problem("must return (sum, weight), which add up over samples", why, "return total, count")


def _cut_problems(tried: Tried, evaluate: Evaluate, samples: int, parts: int) -> Iterator[Problem]:
    """A problem if the parts of the samples do not give together what all of them give at once."""
    whole, other = _value(evaluate, range(samples)), _value(evaluate, range(samples), seed=1)
    if not math.isfinite(whole.mean):
        return
    if not _same(whole, other):
        yield from _random_problems(tried, evaluate, samples)
        return
    alone = _values(evaluate, [[row] for row in range(min(samples, _MOST_ALONE))])
    low = 4.0 * _eps_of([whole, *alone])
    scale, noise, gradient_noise = _scales(evaluate, samples, whole, alone)
    by_gradient: list[Problem] = []
    for cut in _cuts(samples, parts):
        values = _values(evaluate, cut)
        weight = sum(value.weight for value in values)
        if not values or not weight:
            continue
        together = sum(value.total for value in values) / weight
        limit = max(_VALUE, low) * max(scale, abs(together), abs(whole.mean)) + _NOISE * noise
        if not abs(together - whole.mean) <= limit:
            yield _unequal(tried, cut, whole.mean, together)
            return
        far = _distance(whole, values, cut, weight)
        if not by_gradient and far > max(_GRADIENT, low) + _NOISE * gradient_noise:
            why = f"Of {_said_parts(cut)}, the gradients by the output differ by {100 * far:.2g}% of their norm"
            by_gradient = [_unlike(tried, why)]
    yield from by_gradient  # where values agree by chance


def _scales(evaluate: Evaluate, samples: int, whole: Value, alone: Sequence[Value]) -> tuple[float, float, float]:
    """How large the loss is where its terms cancel, and what the order of the samples changes (value, gradient)."""
    weight = sum(value.weight for value in alone)
    scale = sum(abs(value.total) for value in alone if math.isfinite(value.total)) / weight if weight else 0.0
    noise = gradient_noise = 0.0
    for order in (list(range(samples - 1, -1, -1)), [*range(1, samples, 2), *range(0, samples, 2)]):
        (again,) = _values(evaluate, [order]) or [whole]
        difference = abs(again.mean - whole.mean)
        if difference <= 1e-2 * max(scale, abs(whole.mean)):  # else the loss depends on the order, which is no noise
            noise = max(noise, difference)
            far = _distance(whole, [again], [order], again.weight)
            gradient_noise = max(gradient_noise, min(far, 1e-3))
    return scale, noise, gradient_noise


def _cuts(samples: int, parts: int) -> Iterator[list[list[int]]]:
    """Cuts of the samples: equal, uneven and interleaved parts, the layout's number of them, and each sample alone."""
    rows, half = list(range(samples)), samples // 2
    yield _parts(samples, parts)
    yield [rows[:half], rows[half:]]
    yield [rows[:1], rows[1:]]
    yield [rows[:-1], rows[-1:]]
    yield [rows[0::2], rows[1::2]]
    yield _parts(samples, 3)
    if samples <= _MOST_ALONE:
        yield [[row] for row in rows]


def _parts(samples: int, count: int) -> list[list[int]]:
    return [part.tolist() for part in torch.arange(samples).tensor_split(min(count, samples))]


def _values(evaluate: Evaluate, cut: Sequence[Sequence[int]]) -> list[Value]:
    """The values of all parts; none if the loss does not take one of them."""
    try:
        return [_value(evaluate, part) for part in cut]
    except RunnerError:
        raise
    except Exception:  # a part with one sample may be too small for it
        return []


def _distance(whole: Value, values: Sequence[Value], cut: Sequence[Sequence[int]], weight: float) -> float:
    """The distance of the gradients of the mean, relative to their norm; 0 if there is nothing to compare."""
    if not whole.gradients or not all(len(value.gradients) == len(whole.gradients) for value in values):
        return 0.0
    squares = [0.0, 0.0, 0.0]
    for number, gradient in enumerate(whole.gradients):
        expected = gradient / whole.weight
        joined = torch.zeros_like(expected)
        for value, rows in zip(values, cut, strict=True):
            joined[torch.tensor(list(rows), device=joined.device)] = value.gradients[number] / weight
        for place, each in enumerate((expected - joined, expected, joined)):
            squares[place] += float(each.abs().pow(2).sum())
    norms = [math.sqrt(square) for square in squares]
    if not math.isfinite(norms[1]) or not max(norms[1:]):
        return 0.0
    return norms[0] / max(norms[1:]) if math.isfinite(norms[2]) else math.inf


def _eps_of(values: Sequence[Value]) -> float:
    """The rounding step of a format of 16 bits if the values were rounded to it, whatever they are returned in."""
    eps = max(value.eps for value in values)
    totals = torch.tensor([value.total / (1.0 if value.is_pair else value.weight or 1.0) for value in values])
    for dtype in (torch.bfloat16, torch.float16):
        info = torch.finfo(dtype)
        if eps >= info.eps or (len(set(totals.tolist())) > 1 and torch.equal(totals, totals.to(dtype).float())):
            return info.eps
    return 0.0


def _unequal(tried: Tried, cut: Sequence[Sequence[int]], whole: float, parts: float, what: str = "") -> Problem:
    return _unlike(tried, f"Of {_said_parts(cut)}, it gives {what}{_number(whole, parts)} and {_number(parts, whole)}")


def _unlike(tried: Tried, why: str) -> Problem:
    fix = f"{tried.returns}, or schedule.microbatches=1 parallelism.data=1"
    return tried.problem(tried.rule, f"{why}: each number of micro-batches and replicas would train another model", fix)


def _said_parts(cut: Sequence[Sequence[int]]) -> str:
    sizes = ", ".join(str(len(part)) for part in cut[:6]) + (", …" if len(cut) > 6 else "")
    return f"{sum(map(len, cut))} samples at once, and of the same in parts of {sizes}"


def _number(value: float, other: float) -> str:
    """A number with enough digits to tell it from another one."""
    shown = ((f"{value:.{digits}g}", f"{other:.{digits}g}") for digits in range(5, 17))
    return next((own for own, others in shown if own != others), str(value))


def _random_problems(tried: Tried, evaluate: Evaluate, samples: int) -> Iterator[Problem]:
    """For a loss that draws random numbers: whether its mean over many draws clearly differs from that of its parts."""
    half = samples // 2
    cuts = [[list(range(samples))], [list(range(half)), list(range(half, samples))]]
    draws = torch.empty(len(cuts), _DRAWS, dtype=torch.float64)
    for draw in range(_DRAWS):
        for place, cut in enumerate(cuts):
            values = [_value(evaluate, part, seed=2 + draw) for part in cut]
            weight = sum(value.weight for value in values)
            draws[place, draw] = sum(value.total for value in values) / weight if weight else math.nan
    (whole, parts), error = draws.mean(1).tolist(), float(draws.std(1).max()) / math.sqrt(_DRAWS)
    if abs(whole - parts) > _STANDARD_ERRORS * error + _CLEAR * max(abs(whole), abs(parts)):
        yield _unequal(tried, cuts[1], whole, parts, what=f"in the mean of {_DRAWS} draws ")


def _same(first: Value, second: Value) -> bool:
    """Whether two values are equal up to rounding; nothing is known of one that is not finite."""
    pairs = (first.total, second.total), (first.weight, second.weight)
    return all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-12) or not math.isfinite(a) for a, b in pairs)


def _said(value: Value) -> str:
    return f"({value.total:.7g}, {value.weight:.7g})" if value.is_pair else f"{value.mean:.7g}"


def _value(evaluate: Evaluate, rows: Sequence[int], *, seed: int = 0) -> Value:
    with _seeded(seed):
        return evaluate(rows)


def _seeded(seed: int) -> AbstractContextManager[None]:
    return seeded_with(0x10551 + seed)
