"""Copies of a tensor on several ranks start equal and stay equal: those of replicas, of twins, and of tied weights.

Copies get the same gradients and so the same updates. If they differ, they were made differently, or something besides
the optimizer has changed one of them, and all later steps would be wrong without a sign of it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.engine.rank_view import RankView
from runner.engine.transport.base import Transport
from runner.errors import Problem, RunFailedError
from runner.model.dense_parts import dense_parts
from runner.model.layers import StageModule, keeps_running_statistics
from runner.model.seeds import OWN_GENERATOR
from runner.model.tags import ParameterTag, named_parameters
from runner.plan.rules.schedule import statistics_problems

__all__ = ["compare_copies", "running_statistics_problems", "tensor_checksum"]

_MODULUS = (1 << 61) - 1
_CHUNK = 1 << 16  # elements that are summed at once, so that little memory is needed


def compare_copies(
    view: RankView,
    stages: Mapping[int, StageModule],
    tags: Mapping[str, ParameterTag],
    transport: Transport,
    step: int,
) -> None:
    """Compare the checksums of everything that several ranks hold; all ranks call it together.

    Buffers of twins are always compared. Those of replicas are compared before the first step only, because running
    statistics are of each replica's own samples.

    Args:
        view: the place of this rank.
        stages: its stages.
        tags: describes its parameters.
        transport: sends and receives messages.
        step: the number of steps that have been taken.

    Raises:
        RunFailedError: copies of a tensor differ; the ranks that hold it raise the error.
    """
    groups = _tensors_by_holders(view, stages, tags, with_buffers=view.has_twins or not step)
    for ranks in sorted(groups):  # on every rank in the same order, so that none waits for another in a circle
        checksums = {name: tensor_checksum(tensor) for name, tensor in sorted(groups[ranks].items())}
        own = torch.tensor([_fold(checksums.values())], device=transport.device)
        if len({int(each) for each in transport.all_gather(own, ranks)}) > 1:
            raise RunFailedError(_difference(ranks, checksums, transport, step))


def _tensors_by_holders(
    view: RankView, stages: Mapping[int, StageModule], tags: Mapping[str, ParameterTag], *, with_buffers: bool
) -> dict[tuple[int, ...], dict[str, Tensor]]:
    """The tensors of this rank that others hold, too, by the ranks that hold them; each of these has the same names."""
    found: dict[tuple[int, ...], dict[str, Tensor]] = defaultdict(dict)
    for name, parameter in named_parameters(stages).items():
        found[tags[name].holders][name] = parameter
        if tags[name].shard is None:  # each of the ranks that divide the layers has the whole of it
            found[view.shards][name] = parameter
    for stage, module in stages.items() if with_buffers else ():
        for name, buffer in module.named_buffers():
            found[tuple(view.holders[stage])][module.global_name(name)] = buffer
    return {ranks: tensors for ranks, tensors in found.items() if len(ranks) > 1}


def _difference(ranks: Sequence[int], own: Mapping[str, int], transport: Transport, step: int) -> str:
    """What differs, and what to do about it; all ``ranks`` call it together."""
    first, *others = (dict(each) for each in _exchanged(list(own.items()), ranks, transport))
    name, rank = next(
        (name, rank)
        for rank, other in zip(ranks[1:], others, strict=True)
        for name in first | other
        if first.get(name) != other.get(name)
    )
    when = f"after step {step}" if step else "before the first step"
    where = f"{when}: the copies of {name} on ranks {ranks[0]} and {rank} differ"
    if not step:
        return f"{where}: the model function must make the same weights on every rank; {OWN_GENERATOR}"
    return (
        f"{where}, though their gradients are summed: a layer or a callback changes its weights by itself, or a device "
        "computes wrongly. Continue from the last checkpoint with resume=auto, on another machine if it happens again"
    )


def _exchanged(value: object, ranks: Sequence[int], transport: Transport) -> list[Any]:
    """The values of all ``ranks``, which are sent as JSON."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(transport.device)
    lengths = [int(each) for each in transport.all_gather(torch.tensor([len(text)], device=text.device), ranks)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=text.device)
    padded[: len(text)] = text
    texts = transport.all_gather(padded, ranks)
    return [json.loads(bytes(each[:length].tolist())) for each, length in zip(texts, lengths, strict=True)]


def tensor_checksum(tensor: Tensor) -> int:
    """A checksum of every bit of a tensor, which depends on where each element is.

    It is computed on the tensor's device. On one CPU core it reads about two gigabytes per second.
    """
    return _fold(map(_dense_checksum, dense_parts([tensor])))


def _dense_checksum(tensor: Tensor) -> int:
    total = 0
    bits = _bits(tensor.detach())
    factors = _factors(min(_CHUNK, len(bits)), tensor.device)  # not kept: a run would hold it to its end
    for part in torch.split(bits, _CHUNK):
        total = (31 * total + int((part.to(torch.int64) * factors[: len(part)]).sum())) % _MODULUS
    return total


def _fold(checksums: Iterable[int]) -> int:
    total = 0
    for each in checksums:
        total = (31 * total + each) % _MODULUS
    return total


def _factors(count: int, device: torch.device) -> Tensor:
    """An odd factor for each place of a chunk, of mixed bits; products and their sums overflow, which is no harm.

    Source of the constants: Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014 (SplitMix64).
    """
    mixed = torch.arange(1, count + 1, device=device).mul_(_signed(0x9E3779B97F4A7C15))
    mixed ^= mixed >> 30
    mixed *= _signed(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> 27
    return mixed.bitwise_or_(1)


def _signed(value: int) -> int:
    """The signed number with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _bits(tensor: Tensor) -> Tensor:
    """View the memory of a tensor as whole numbers, in one dimension."""
    flat = tensor.contiguous().view(-1)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
    return torch.view_as_real(flat).view(-1).view(width) if flat.is_complex() else flat.view(width)


def running_statistics_problems(view: RankView, stages: Mapping[int, StageModule], schedule: str) -> list[Problem]:
    """The problems of layers whose running statistics would differ between twins, which see different micro-batches."""
    names = [
        module.global_name(f"{path}.running_mean").removesuffix(".running_mean")
        for module in stages.values()
        for path, layer in module.named_modules()
        if view.has_twins and keeps_running_statistics(layer)
    ]
    return statistics_problems(schedule, names)
