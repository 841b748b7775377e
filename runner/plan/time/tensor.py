"""The seconds and bytes of what ranks exchange that divide layers among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from runner.config.links import ranks_of_node
from runner.config.precision import weight_widths
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import optimizer_of
from runner.plan.stages.figures import StageFigures
from runner.plan.time.network import Network
from runner.plan.values import Link
from runner.profile import Exchange, LayerProfile, ModelProfile
from runner.schedule.simulation.clock import StageCosts
from runner.schedule.values import Op, Payload, Program

__all__ = [
    "exchange_seconds",
    "exchanged_bytes",
    "gathered_bytes",
    "scatters",
    "update_bytes",
    "with_exchanges",
    "with_boundaries",
]

_MATRIX, _HALF_WIDTH = 2, 2


def scatters(config: RunConfig) -> bool:
    """Whether each rank of those that divide layers sends a part of what passes between stages.

    If the request leaves it open, it is so where these ranks are on one node and the run has several.
    """
    asked, here = config.parallelism, ranks_of_node(config.hardware)
    if asked.tensor == 1 or asked.sequence or asked.pipeline == 1:
        return False
    if asked.scatter_boundaries is not None:
        return asked.scatter_boundaries
    return here is not None and not here % asked.tensor and asked.pipeline * asked.data * asked.tensor > here


def with_boundaries(
    costs: StageCosts,
    config: RunConfig,
    profile: ModelProfile,
    figures: Sequence[StageFigures],
    ratio: float,
    network: Network,
    rows: Sequence[Sequence[int]],
) -> StageCosts:
    """The costs with messages over the link of each boundary; parts of one may be sent, and put together then.

    Args:
        costs: the costs of whole boundaries over the link between neighbours.
        config: the request.
        profile, figures: the model and its stages.
        ratio: samples of a micro-batch for one of the profile's.
        network: the links between all ranks.
        rows: for each pipeline of a replica, the place of each stage.
    """
    by_parts, ranks = scatters(config), config.parallelism.tensor
    links, within = network.boundaries(rows, config.parallelism.data, ranks), network.parts(ranks)
    if not by_parts and all(each == network.inside for each in links):
        return costs
    comm, occupancy = [], []
    for stage, between in zip(figures[:-1], links, strict=True):
        parts = scattered_bytes(config, profile.layers[stage.last])[0] if by_parts else 0
        sent = (stage.output_bytes - parts + parts / ranks) * ratio
        gathered = exchange_seconds([Exchange("all_gather", round(parts * ratio), 1)], ranks, within) if parts else 0.0
        comm.append(between.seconds(sent) + gathered)
        occupancy.append(between.transfer_seconds(sent))
    return replace(costs, comm=comm, occupancy=occupancy)


def scattered_bytes(config: RunConfig, layer: LayerProfile) -> tuple[int, int]:
    """The bytes of a layer's output that are sent by parts, and of its gradient."""
    ranks, width = config.parallelism.tensor, weight_widths(config)[0]
    parts = [each for each in layer.output if each.gradient_bytes and not each.num_bytes // width % ranks]
    return sum(each.num_bytes for each in parts), sum(each.gradient_bytes for each in parts)


def gathered_bytes(
    config: RunConfig, profile: ModelProfile, program: Program, figures: Sequence[StageFigures]
) -> float:
    """The bytes that each rank sends, of all stages together, to put together the boundaries of one micro-batch's size.

    They are those of one window, for as many micro-batches of the profile's size as it has.
    """
    if not scatters(config):
        return 0.0
    total, ranks = 0.0, config.parallelism.tensor
    for action in (each for row in program.actions for each in row if each.op is Op.SEND):
        if action.payload in (Payload.ACTIVATION, Payload.INPUT, Payload.GRADIENT):
            back = action.payload is Payload.GRADIENT
            layer = profile.layers[figures[action.stage - back].last]
            total += scattered_bytes(config, layer)[back]
    return (ranks - 1) / ranks * total / program.schedule.windows


def with_exchanges(profile: ModelProfile, ranks: int, link: Link) -> ModelProfile:
    """The profile with the seconds of exchanges in those of the layers: a rank does nothing else meanwhile.

    Args:
        profile: its layers and its loss are those of one of the ranks, whose seconds are without exchanges.
        ranks: the number of ranks that divide each layer.
        link: between two of them.
    """
    if ranks == 1 or profile.exchanges_take_time:
        return profile
    layers = tuple(_slowed(layer, ranks, link) for layer in profile.layers)
    return replace(profile, layers=layers, loss=_slowed(profile.loss, ranks, link), exchanges_take_time=True)


def exchange_seconds(exchanges: Iterable[Exchange], ranks: int, link: Link) -> float:
    """The seconds of exchanges one after the other, in a ring.

    A sum over R ranks takes 2 (R - 1) messages of 1/R of the bytes; a gathering, or a sum of which each rank keeps a
    part, takes half as many.
    """
    total = 0.0
    for each in exchanges:
        messages = (2 if each.kind == "all_reduce" else 1) * (ranks - 1)
        total += each.count * messages * link.seconds(each.num_bytes / ranks)
    return total


def exchanged_bytes(profile: ModelProfile, ranks: int) -> float:
    """The bytes that each rank sends for one micro-batch through all layers and back, without a second forward."""
    rows = (*profile.layers, profile.loss)
    return sum(each.sent_bytes(ranks) for row in rows for each in (*row.forward_exchanges, *row.backward_exchanges))


def update_bytes(config: RunConfig, profile: ModelProfile, ranks: int) -> float:
    """The bytes that each rank sends in a step as it updates parts of weights, of all stages together.

    They are those of two norms of each weight, or of matrices in 16 bits that are put together.
    """
    kind = optimizer_of(config.optimizer)
    if kind.whole_matrices:
        parts = sum(prod(shape) for shape in profile.divided_shapes if len(shape) == _MATRIX)
        return Exchange("all_gather", _HALF_WIDTH * parts * ranks, 1).sent_bytes(ranks)
    if kind.norms_from is None:
        return 0.0
    count = sum(len(shape) >= kind.norms_from for shape in profile.divided_shapes)
    return Exchange("all_reduce", weight_widths(config)[1] * count, 2).sent_bytes(ranks)


def _slowed(layer: LayerProfile, ranks: int, link: Link) -> LayerProfile:
    forward = exchange_seconds(layer.forward_exchanges, ranks, link)
    backward = exchange_seconds(layer.backward_exchanges, ranks, link)
    if not forward and not backward:
        return layer
    of_input = layer.input_gradient_seconds
    return replace(
        layer,
        forward_seconds=layer.forward_seconds + forward,
        backward_seconds=layer.backward_seconds + backward,
        input_gradient_seconds=None if of_input is None else of_input + backward,
    )
