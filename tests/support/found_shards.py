"""Compares the ranks' programs that the finder makes with the plain module, which knows nothing of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shard_ranks import RankExchange, run_sharded
from torch import Tensor, nn

from runner.model.sharded.finder import DividedPrograms, divided
from runner.model.sharded.group import ShardGroup
from runner.model.sharded.sequence import sequenced
from runner.model.traced.cuts import good_cuts
from runner.model.traced.operators import Program, trace
from runner.model.traced.segments import split

__all__ = ["Compared", "compared", "count", "flat_of", "found"]


@dataclass
class Compared:
    """Of a model on ranks.

    Args:
        error: the largest difference of an output or of a gradient, relative to its largest element. A gradient that is
            zero but for rounding, such as that of the keys' bias, is compared to the other gradients.
        divided: what the first rank got.
        forward, backward: what a rank exchanges.
        cuts: the positions at which the programs were cut.
    """

    error: float
    divided: DividedPrograms
    forward: list[str]
    backward: list[str]
    cuts: list[int]


def flat_of(value: Any) -> list[Tensor]:
    """The floating-point tensors of an output."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [tensor for each in value for tensor in flat_of(each)] if isinstance(value, tuple | list) else []


def _loss(output: Any) -> Tensor:
    """A sum in which every element has another weight, so that its gradient tells elements apart."""
    flat = torch.cat([each.flatten() for each in flat_of(output)])
    weights = torch.linspace(-1, 1, len(flat), dtype=flat.dtype).cos()
    return (flat * weights).sum() + (flat**2).sum() / 3


def _run(chain: Sequence[nn.Module], value: Any) -> Any:
    for module in chain:
        value = module(value)
    return value


def found(model: nn.Module, value: Any, degree: int, **options: bool) -> DividedPrograms:
    """What the finder divides of a model, for the first rank."""
    return divided(model, trace(model, value, "model"), ShardGroup(degree, 0), **options)


def compared(
    model: nn.Module,
    value: Any,
    degree: int,
    *,
    training: bool = True,
    cut: bool = False,
    programs: dict[bool, Program] | None = None,
    tokens: bool = False,
) -> Compared:
    """Run a model of 64-bit numbers as it is, and on ranks.

    Args:
        value: its input; floating-point tensors get gradients, which are compared, too.
        cut: whether each rank runs a chain of segments.
        programs: the model's trace; made with the input if it is not given.
        tokens: whether values between divided layers are divided by tokens, too.
    """
    traced = programs or trace(model, value, "model")
    model.train(training).zero_grad()
    state = torch.get_rng_state()
    given = _leaf(value)
    expected = model(*given) if isinstance(given, tuple) else model(given)
    _loss(expected).backward()  # type: ignore[no-untyped-call]

    def rank(group: ShardGroup, exchange: RankExchange) -> tuple[Any, ...]:
        own = copy.deepcopy(model).train(training)
        for parameter in own.parameters():
            parameter.grad = None
        result = divided(own, traced, group)
        parameters = dict(own.named_parameters())
        for name, shard in result.shards.items():
            parameters[name].data = shard.cut(parameters[name].data)
            assert parameters[name].shape == shard.shape
        programs = result.programs
        if tokens:
            programs = sequenced(own, programs, group, (None,) * len(programs[True].inputs), last=True).programs
        cuts = good_cuts(programs[True], programs[False], 1) if cut else []
        chain = [segment.train(training) for _, segment in split(own, programs, cuts)]
        mine = _leaf(value)
        output = _run(chain, mine)
        forward, exchange.calls = exchange.calls, []
        _loss(output).backward()  # type: ignore[no-untyped-call]
        gradients = {name: parameter.grad for name, parameter in own.named_parameters()}
        return result, flat_of(output), gradients, forward, exchange.calls, cuts, flat_of(mine)

    torch.set_rng_state(state)
    ranks = run_sharded(degree, rank)
    first = ranks[0]
    errors = [_error(a, b) for each in ranks for a, b in zip(each[1], flat_of(expected), strict=True)]
    errors += [_error(a.grad, b.grad) for each in ranks for a, b in zip(each[6], flat_of(given), strict=True)]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    for name, wanted in gradients.items():
        parts = [each[2][name] for each in ranks]
        if wanted is None:
            assert all(part is None or not part.any() for part in parts), name
        else:
            errors.append(_error(_joined(name, parts, first[0]), wanted, 1e-3 * largest))
    return Compared(max(errors), first[0], first[3], first[4], first[5])


def _joined(name: str, parts: list[Tensor], result: DividedPrograms) -> Tensor:
    """The whole gradient that ranks have of a parameter."""
    if name in result.shards:
        return result.shards[name].join(parts)
    assert all(torch.equal(part, parts[0]) for part in parts), name
    return parts[0]


def _leaf(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_leaf(each) for each in value)
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _error(made: Tensor | None, wanted: Tensor | None, least: float = 1e-300) -> float:
    if made is None or wanted is None:
        assert made is wanted is None
        return 0.0
    assert made.shape == wanted.shape
    made, wanted = made.detach(), wanted.detach()
    return float((made - wanted).abs().max()) / max(float(wanted.abs().max()), least)


def count(program: Program, name: str) -> int:
    """How often a program runs an operator of the ranks' exchange."""
    return sum(str(node.target) == f"runner_shards.{name}.default" for node in program.nodes)
