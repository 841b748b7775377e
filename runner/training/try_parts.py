"""Tries how a user, or transformers, divides layers on a first batch: parts must have the whole model's gradients.

A rule may divide one layer and leave another whole whose output the divided one reads, as where heads of queries are
divided and one head of keys serves all of them. Each rank then has a part of the gradients of the whole layer, and of
all that lies before it, without a word. Parts that are threads of this process show it before a run.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from runner.config.schema import RunConfig
from runner.engine.transport.tensor_group import TensorGroup
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.errors import Problem, RequestError
from runner.model.load import LoadedModel, load_model
from runner.model.sharded.plan import Division
from runner.profile import ModelProfile
from runner.profiling.meet import Batch, loss_of_batch, runs_here

__all__ = ["try_parts"]

logger = logging.getLogger(__name__)

_MOST_OFF = 0.01  # of a gradient's largest number; in 32 bits, other orders of sums make less than a thousandth of it
_NOISE = 1e-3  # of the largest gradient of all: what is smaller may be nothing but rounding
_RULES = "parallelism.sharding"


def try_parts(config: RunConfig, profile: ModelProfile, batch: Batch | None) -> None:
    """Compare gradients of the divided model with those of the whole one.

    Args:
        config: the request.
        profile: the profile of its model.
        batch: input and target of the first micro-batch; None if the data may not be there yet.

    Raises:
        RequestError: a gradient of the parts is another one.
    """
    degree = config.parallelism.tensor
    if batch is None or degree == 1 or not runs_here(config, profile, times=degree + 1):
        return
    config = copy.deepcopy(config)
    config.parallelism.sequence, config.precision.name = False, "fp32"
    parts = [load_model(config, cut=False, shard=index) for index in range(degree)]
    if any(part.division is None or part.step is not None for part in parts):
        return
    built = [_built(part) for part in parts]
    whole = load_model(config, cut=False)
    expected = _gradients(config, whole, _built(whole), batch)

    def rank(transport: ThreadTransport) -> dict[str, Tensor]:
        part, modules = parts[transport.rank], built[transport.rank]
        assert part.division is not None
        part.division.group.exchange = TensorGroup(transport, range(degree))
        with transport.exclusive():
            return _gradients(config, part, modules, batch)

    try:
        made = run_ranks(degree, rank)
    except RequestError:
        raise
    except Exception as error:  # of a user's code in threads: the run itself has none
        logger.info("rules for dividing layers could not be tried: %s", error)
        return
    for part, found in zip(parts, made, strict=True):
        assert part.division is not None
        _compare(config, expected, found, part.division)


def _built(model: LoadedModel) -> list[nn.Module]:
    """The layers' modules, which draw nothing and change no statistics."""
    return [layer.build().float().eval() for layer in model.layers]


def _gradients(config: RunConfig, model: LoadedModel, modules: Sequence[nn.Module], batch: Batch) -> dict[str, Tensor]:
    with torch.enable_grad():
        torch.autograd.backward(loss_of_batch(config, model, modules, batch, torch.device("cpu")))
    pairs = zip(model.layers, modules, strict=True)
    named = {source.full_name(name): each for source, module in pairs for name, each in module.named_parameters()}
    return {name: weight.grad for name, weight in named.items() if weight.grad is not None}


def _compare(
    config: RunConfig, expected: Mapping[str, Tensor], found: Mapping[str, Tensor], division: Division
) -> None:
    """Refuse the rules whose parts have another gradient of a weight than its part of the whole model's."""
    off, shards = dict[str, float](), division.shards
    largest = {name: float(gradient.abs().max()) for name, gradient in expected.items() if gradient.numel()}
    least = _NOISE * max(largest.values(), default=0.0)
    for name, gradient in found.items():
        if largest.get(name, 0.0) > least:  # the gradient of a bias of keys is noise
            whole = shards[name].cut(expected[name]) if name in shards else expected[name]
            off[name] = float((gradient - whole).abs().max()) / largest[name]
    wrong = [name for name, share in off.items() if not share <= _MOST_OFF]
    if wrong:
        worst = max(wrong, key=lambda name: off[name])
        rule = "must give the gradients of the whole model"
        why = (
            f"On a first batch that of {worst} is off by {off[worst]:.0%} of its largest number. A rank uses for its "
            f"part what is whole: partial for such a layer adds up its own gradients, and not those before it"
        )
        asked = config.parallelism.sharding
        if division.is_of_transformers:
            instead = f"{_RULES}={{}}, which divides what traces show instead of what transformers' plan names"
            raise RequestError([Problem("model.target", config.model.target, rule, why, instead)])
        if asked is None:
            raise RequestError([Problem("model.target", config.model.target, rule, f"{why}: see its tensor_plan()")])
        raise RequestError([Problem(_RULES, dict(asked), rule, why, f"without {_RULES}: what traces show is divided")])
