"""``planner=dapple``: the shortest flushed step by warm-up, steady phase and end, over side-by-side pipelines.

For every number of devices of a pipeline, as many pipelines as there is room for. For each number of stages, they are
cut such that the slowest stage or message takes least, each with replicas of its own, and beside that every cut in two
stages is looked at; pipelines of more than 8 devices have at most 3 stages, or one for each device. The step is
block (M - 1) + the stages, messages, and what the sums of gradients take beyond the drain. Memory is not checked. The
planner shares out the samples of a micro-batch among the replicas of a stage; where their numbers differ, the engine's
take micro-batches in turns.

If the links inside nodes are others than those between nodes (``hardware.links``), replicas are placed, too: fresh
first, append first or scatter first (:mod:`runner.plan.planners.published.placing`). Of equally short steps those are
taken whose replicas are neighbours, as the engine's ranks are; what is placed otherwise is told, not run.

Source: Fan et al. 2021, DAPPLE, and its public planner's form (reconstruction).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from runner.plan.planners.kinds import CUTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, Stages, answer_of, divisors
from runner.plan.planners.published.placing import Nodes, Place, Placing, nodes_of
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["PLANNER", "Placed", "length", "placed_blocks", "plan"]

_FEW = 8  # devices up to which there may be any number of stages
_STAGES = 3  # of more devices, beside one device for each stage
_WORK = 5_000  # stages and places that are looked at for one number of devices
_SAME = 1 + 1e-12  # seconds that differ by rounding alone
_SCATTERED = (
    "its replicas are on the nodes in another order than the engine's ranks: {} of each node's devices, by stage"
)


@dataclass(frozen=True, slots=True)
class Placed:
    """Stages of pipelines side by side.

    Args:
        stages: their first and last layers.
        replicas: the number of each stage's replicas in one of the pipelines.
        places: where each stage's devices are, those of all pipelines.
    """

    stages: Stages
    replicas: tuple[int, ...]
    places: tuple[Place, ...]


def plan(problem: PlanningProblem) -> PlanningAnswer:
    """The answer to a problem."""
    best: tuple[float, Placed, tuple[int, ...], int] | None = None
    nodes = nodes_of(problem.links, problem.ranks)
    for devices in divisors(problem.ranks):
        aside = problem.ranks // devices
        for microbatches in divisors(problem.batch // aside) if problem.batch % aside == 0 else []:
            chain = Chain(problem, problem.divisions[0], problem.batch / (aside * microbatches))
            for found in [*placed_blocks(chain, devices, aside, nodes), *_in_two(chain, devices, aside, nodes)]:
                seconds = length(chain, found, microbatches, aside, nodes)
                if best is None or seconds * _SAME < best[0]:
                    best = seconds, found, tuple(aside * each for each in found.replicas), microbatches
    assert best is not None  # one device is always a pipeline
    seconds, found, replicas, microbatches = best
    kept, parts = (problem.divisions[0].kept[0].name,) * len(found.stages), (1,) * len(found.stages)
    is_of_ranks = found.places == nodes.in_order(replicas)
    where = ", ".join("+".join(map(str, each)) for each in found.places)
    return answer_of(
        "dapple",
        problem,
        found.stages,
        replicas=replicas,
        tensor=parts,
        microbatches=microbatches,
        kept=kept,
        seconds=seconds,
        needs=() if is_of_ranks else (_SCATTERED.format(where),),
    )


def _in_two(chain: Chain, devices: int, aside: int, nodes: Nodes) -> Iterator[Placed]:
    """Every cut in two stages, with every number of replicas of each and all their places."""
    layers = len(chain.problem.layers)
    for own in range(1, devices):
        replicas = own, devices - own
        firsts = nodes.places(nodes.empty, (), own * aside)
        pairs = [nodes.in_order([each * aside for each in replicas])]
        pairs += [(first, second) for first in firsts for second in nodes.places(first, first, replicas[1] * aside)]
        for stages in [((0, first - 1), (first, layers - 1)) for first in range(1, layers)]:
            yield from (Placed(stages, replicas, pair) for pair in pairs)


def placed_blocks(chain: Chain, devices: int, aside: int, nodes: Nodes) -> Iterator[Placed]:
    """For each number of stages the least slowest stage or message on exactly so many devices of each pipeline.

    Args:
        chain: the layers.
        devices: the devices of each pipeline.
        aside: the number of pipelines side by side.
        nodes: where all their devices are.
    """
    for stages, alone in ((devices, False),) if devices <= _FEW else ((_STAGES, False), (devices, True)):
        own = partial(Placing, chain, devices=devices, aside=aside, stages=stages, alone=alone)
        in_order = own(nodes, in_order=True).search()
        found = list(in_order.values())
        if nodes.count > 1:
            least = own(Nodes(1, nodes.count * nodes.devices, nodes.inside, nodes.between)).search()
            most = {count: each[0] / _SAME for count, each in in_order.items() if each[0] > least[count][0] * _SAME}
            if most:  # a message between nodes is the slowest
                found += own(nodes, most=most, work=_WORK).search().values()
        for _, cut, places in found:
            replicas = tuple(sum(place) // aside for place in places)
            yield Placed(cut, replicas, nodes.in_order([each * aside for each in replicas]))
            yield Placed(cut, replicas, places)


def _messages(chain: Chain, placed: Placed, aside: int, nodes: Nodes) -> list[float]:
    """Seconds of each message there and back."""
    ends = [last + 1 for _, last in placed.stages[:-1]]
    parts = [nodes.elsewhere(*pair) for pair in pairwise(placed.places)]
    return [
        2 * nodes.message_seconds(chain.message_bytes(end), part, aside) for end, part in zip(ends, parts, strict=True)
    ]


def _times(chain: Chain, placed: Placed) -> list[float]:
    pairs = zip(placed.stages, placed.replicas, strict=True)
    return [chain.seconds(first, last + 1) / own for (first, last), own in pairs]


def _block(chain: Chain, placed: Placed, aside: int, nodes: Nodes) -> float:
    return max([*_times(chain, placed), *_messages(chain, placed, aside, nodes)])


def length(chain: Chain, placed: Placed, microbatches: int, aside: int, nodes: Nodes) -> float:
    """Seconds of a step by the planner's formula."""
    times, messages = _times(chain, placed), _messages(chain, placed, aside, nodes)
    block = max([*times, *messages])
    late = 0.0
    for number, ((first, last), place) in enumerate(zip(placed.stages, placed.places, strict=True)):
        sums = nodes.sum_seconds(chain.total("gradient", first, last + 1), place)
        late = max(late, sums - number * block)
    return block * (microbatches - 1) + sum(times) + sum(messages) + late


PLANNER = PlannerKind(
    name="dapple",
    plan=plan,
    axes=(
        REPLICAS,
        CUTS,
    ),
    chooses="cut, replicas of each stage and their nodes, pipelines, micro-batches",
    by="dynamic program, then the flushed step's length",
    lacks="memory; bubbles of unlike stages: it is up to 14 % too long",
    position=20,
)
