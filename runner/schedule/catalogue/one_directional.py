"""Every schedule of this version: what it is, what it asks for, how it is made."""

from __future__ import annotations

from dataclasses import replace

from runner.errors import Problem, RequestError
from runner.schedule.catalogue.bidirectional import BIDIRECTIONAL
from runner.schedule.catalogue.kinds import Formulas, Legal, ScheduleRequest, ScheduleSpec
from runner.schedule.generators.asynchronous.pipedream_2bw import SPEC as PIPEDREAM_2BW
from runner.schedule.generators.one_directional.bpipe import bpipe
from runner.schedule.generators.one_directional.building_blocks import v_half, v_min
from runner.schedule.generators.one_directional.dualpipe_v import dualpipe_v
from runner.schedule.generators.one_directional.from_file import read_schedule
from runner.schedule.generators.one_directional.gpipe import gpipe
from runner.schedule.generators.one_directional.hanayo import hanayo
from runner.schedule.generators.one_directional.looped import group_size, interleaved_1f1b, looped_bfs
from runner.schedule.generators.one_directional.naive import naive
from runner.schedule.generators.one_directional.one_f_one_b import one_f_one_b, one_f_one_b_eager
from runner.schedule.generators.one_directional.pipefb import pipefb
from runner.schedule.generators.one_directional.pipefisher import pipefisher
from runner.schedule.generators.one_directional.varuna import varuna
from runner.schedule.generators.one_directional.zb_auto import zb_auto
from runner.schedule.generators.one_directional.zb_v import zb_v
from runner.schedule.generators.one_directional.zero_bubble import zb_h1, zb_h2
from runner.schedule.search import search
from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.values import Schedule

__all__ = ["CATALOGUE", "SEARCHED"]

_ANY_CHUNKS = Legal("at least 1", lambda ranks, chunks: True)
_TWO_CHUNKS = Legal("2 or null, one down and one up the V", lambda ranks, chunks: chunks == 2)
_EVEN_CHUNKS = Legal("even or null, two for each wave", lambda ranks, chunks: chunks % 2 == 0)

_LOOPED_SLOTS = "((v - 1) * max(T, D) + T + D - 1)"
_V_HALF_IDLE = "(7 * D - (7 if D % 2 else 4)) * F / 4"
_V_MIN_IDLE = "(4 * D - (5 if D % 3 else 3)) * F / 2"
_EQUAL = "F == I == W and B == I + W"


def _pipeline(peak: str, when: str = "True") -> Formulas:
    """Of gpipe, 1f1b and its relatives, which differ in memory alone."""
    return Formulas("(T + D - 1) * (F + B)", "(D - 1) / (T + D - 1)", peak, "(D - 1) * (F + B)", when)


def _looped(peak: str) -> Formulas:
    """Of both looping schedules; with T >= D the bubble is (D - 1) / (v T + D - 1)."""
    idle = f"({_LOOPED_SLOTS} / v - T) * (F + B)"
    return Formulas(f"{_LOOPED_SLOTS} * (F + B) / v", f"1 - v * T / {_LOOPED_SLOTS}", peak, idle)


def _zero_bubble(extra: str, peak: str, inner_idle: str, when: str) -> Formulas:
    """Of a schedule that takes ``extra`` time beyond its compute."""
    work = "T * (F + I + W)"
    return Formulas(f"{work} + {extra}", f"{extra} / ({work} + {extra})", peak, inner_idle, when)


def _zb_auto(request: ScheduleRequest) -> Schedule:
    costs, ranks = request.costs, request.ranks
    per_stage = costs.per_stage(ranks, 1) if isinstance(costs, Costs) else costs
    return zb_auto(ranks, request.microbatches, per_stage, request.memory_limit or ranks)


def _varuna(request: ScheduleRequest) -> Schedule:
    """A rank that takes forwards before their turn holds at most a step's."""
    order = varuna(request.ranks, request.microbatches)
    return replace(order, ahead=request.memory_limit or request.microbatches) if request.opportunistic else order


def _varuna_problems(request: ScheduleRequest) -> list[Problem]:
    if request.memory_limit is None or request.opportunistic:
        return []
    why = "Without it the order is fixed, and with it what a rank keeps"
    fix = "schedule.memory_limit=null"
    rule = "needs schedule.opportunistic=true"
    return [Problem("schedule.memory_limit", request.memory_limit, rule, why, fix)]


def _auto(request: ScheduleRequest) -> Schedule:
    """Chosen by the costs of the request alone; a plan knows the stages' seconds and bytes, and chooses by them."""
    costs, limit = request.costs, request.memory_limit

    def costs_of(placement: tuple[int, ...]) -> StageCosts:
        return costs.per_stage(len(placement), len(placement) // request.ranks) if isinstance(costs, Costs) else costs

    def rate(schedule: Schedule) -> tuple[float, bool]:
        played = simulate(schedule, costs_of(schedule.placement[0]))
        return played.makespan, limit is None or max(played.peak_activations) <= limit

    return search(request, SEARCHED, costs_of, rate).best.schedule


_FILLED = {"1f1b": one_f_one_b, "gpipe": gpipe}


def _pipefisher(request: ScheduleRequest) -> Schedule:
    base, costs = _FILLED[request.base or "1f1b"](request.ranks, request.microbatches), request.costs
    return pipefisher(base, costs.per_stage(request.ranks, 1) if isinstance(costs, Costs) else costs)


def _pipefisher_problems(request: ScheduleRequest) -> list[Problem]:
    base = request.base
    if base is None or base in _FILLED:
        return []
    why = "Its work needs whole backwards, and every micro-batch of a stage on one rank"
    if base == "chimera":
        why = "Its pipelines hold each stage twice, and each copy sees a part of the micro-batches"
    return [Problem("schedule.base", base, f"must be one of {', '.join(_FILLED)}", why, "schedule.base=1f1b")]


def _read(request: ScheduleRequest) -> Schedule | list[Problem]:
    if request.file is None:
        why = "The order is read from it: torch's schedule CSV, one row per rank, cells like 0F0"
        return [Problem("schedule.file", None, "must name a file for schedule=from_file", why, "schedule.file=FILE")]
    return read_schedule(request.file)


def _fits_file(request: ScheduleRequest) -> list[Problem]:
    found = _read(request)
    if not isinstance(found, Schedule):
        return found
    chunks = found.chunks if request.chunks is None else request.chunks
    pairs = (
        ("parallelism.pipeline", request.ranks, found.ranks, "ranks"),
        ("schedule.microbatches", request.microbatches, found.microbatches // found.parts, "micro-batches"),
        ("schedule.chunks", chunks, found.chunks, "chunks per rank"),
    )
    why = f"{request.file} is written for so many"
    return [
        Problem(path, asked, f"must be {held}, the {what} of the file", why, f"{path}={held}")
        for path, asked, held, what in pairs
        if asked != held
    ]


def _generate_from_file(request: ScheduleRequest) -> Schedule:
    found = _read(request)
    if not isinstance(found, Schedule):
        raise RequestError(found)  # the file changed since it was checked
    return found


CATALOGUE: tuple[ScheduleSpec, ...] = (
    ScheduleSpec(
        name="naive",
        description="one micro-batch at a time through all ranks and back",
        summary="one micro-batch at a time: one rank of p works",
        source="the baseline of every pipeline paper",
        formulas=Formulas("T * D * (F + B)", "(D - 1) / D", "1", "T * (D - 1) * (F + B)"),
        generate=lambda request: naive(request.ranks, request.microbatches),
        one_rank=True,
    ),
    ScheduleSpec(
        name="gpipe",
        description="all forwards, then all backwards",
        summary="all forwards, then all backwards",
        source="Huang et al., GPipe, 2019",
        formulas=_pipeline("T"),
        generate=lambda request: gpipe(request.ranks, request.microbatches),
        one_rank=True,
    ),
    ScheduleSpec(
        name="1f1b",
        description="one forward, one backward after a short warm-up: gpipe's time with fewer activations",
        summary="one forward, one backward in turn",
        source="Fan et al., DAPPLE, 2021; Narayanan et al., PipeDream-Flush, 2021",
        formulas=_pipeline("min(T, D - r)"),
        generate=lambda request: one_f_one_b(request.ranks, request.microbatches),
        one_rank=True,
    ),
    ScheduleSpec(
        name="bpipe",
        description="1f1b whose first ranks lend micro-batches to the last ones: half of the peak, for messages",
        summary="`1f1b` whose first ranks lend activations to the last",
        source="Kim et al., BPipe, 2023",
        formulas=_pipeline("min(D // 2 + 1, D - r) if r < D // 2 else D // 2", when="T >= D"),
        generate=lambda request: bpipe(request.ranks, request.microbatches),
        ranks=Legal("even", lambda _, ranks: ranks % 2 == 0),
    ),
    ScheduleSpec(
        name="1f1b_eager",
        description="1f1b with twice the warm-up, which hides the time of messages",
        summary="more forwards ahead, which hide messages",
        source="Zheng et al., Alpa, 2022; Fan et al., DAPPLE, 2021, policy B",
        formulas=_pipeline("min(T, 2 * (D - 1 - r) + 1)"),
        generate=lambda request: one_f_one_b_eager(request.ranks, request.microbatches),
    ),
    ScheduleSpec(
        name="interleaved_1f1b",
        description="1f1b over several chunks per rank: 1 / v of its bubble, v times its messages",
        summary="several stages per rank: less idle, more messages",
        source="Narayanan et al., Megatron-LM, 2021; torch's ScheduleInterleaved1F1B",
        formulas=_looped("min(v * T, 2 * (D - 1 - r) + (v - 1) * T // max(1, T // D) + 1) / v"),
        generate=lambda request: interleaved_1f1b(request.ranks, request.microbatches, request.chunks or 2),
        default_chunks=2,
        chunks=_ANY_CHUNKS,
        microbatches=Legal(
            "a multiple of max(1, T // D), the number of groups",
            lambda ranks, microbatches: group_size(ranks, microbatches) is not None,
        ),
    ),
    ScheduleSpec(
        name="looped_bfs",
        description="breadth first: all micro-batches through a chunk, then the next; weights are used in one stretch",
        summary="`interleaved_1f1b` breadth first: a stage's weights are used in one stretch",
        source="Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023; torch's ScheduleLoopedBFS",
        formulas=_looped("T"),
        generate=lambda request: looped_bfs(request.ranks, request.microbatches, request.chunks or 2),
        default_chunks=2,
        chunks=_ANY_CHUNKS,
    ),
    ScheduleSpec(
        name="zb_h1",
        description="weight gradients fill the bubble; 1f1b's memory",
        summary="gradients of weights, computed apart, fill the bubble",
        source="Qi et al., Zero Bubble Pipeline Parallelism, 2024; torch's ScheduleInterleavedZeroBubble of one stage",
        formulas=_zero_bubble("(D - 1) * (F + I - W)", "D", "(D - 1) * (F + I - W)", "T >= D and W <= F and W <= I"),
        generate=lambda request: zb_h1(request.ranks, request.microbatches),
    ),
    ScheduleSpec(
        name="zb_h2",
        description="no idle time inside a step for twice the memory; pays off where steps run into each other",
        summary="`zb_h1` with more forwards ahead: 0 idle with `schedule.post_validation`",
        source="Qi et al., Zero Bubble Pipeline Parallelism, 2024",
        formulas=_zero_bubble("(D - 1) * F", "2 * D - 1", "(D - 1) * (F + I - 2 * W)", "W <= F and W <= I"),
        generate=lambda request: zb_h2(request.ranks, request.microbatches),
        microbatches=Legal("at least 2 D - 1", lambda ranks, microbatches: microbatches >= 2 * ranks - 1),
    ),
    ScheduleSpec(
        name="zb_auto",
        description="zero bubble by list scheduling from the stages' seconds, or cost.*, under schedule.memory_limit",
        summary="order found for measured seconds, under `schedule.memory_limit`",
        source="Qi et al., Zero Bubble Pipeline Parallelism, 2024, automatic scheduling",
        formulas=None,
        generate=_zb_auto,
        keys=frozenset({"memory_limit"}),
        by_costs=True,
    ),
    ScheduleSpec(
        name="zb_v",
        description="zero bubble in a V of two chunks per rank; 1f1b's memory on every rank",
        summary="two stages per rank, down and up; 0 idle with `schedule.post_validation`",
        source="Qi et al., Zero Bubble Pipeline Parallelism, 2024; torch's ScheduleZBVZeroBubble",
        formulas=_zero_bubble("(D - 1) * F / 2", "D", "0", f"T >= 2 * D - 1 and {_EQUAL}"),
        generate=lambda request: zb_v(request.ranks, request.microbatches),
        default_chunks=2,
        chunks=_TWO_CHUNKS,
    ),
    ScheduleSpec(
        name="v_half",
        description="a V with half of 1f1b's activations and about its bubble",
        summary="half of `1f1b`'s memory as p grows",
        source="Qi et al., Pipeline Parallelism with Controllable Memory, 2024",
        formulas=_zero_bubble(_V_HALF_IDLE, "D // 2 + 1", _V_HALF_IDLE, f"T > D and {_EQUAL}"),
        generate=lambda request: v_half(request.ranks, request.microbatches),
        default_chunks=2,
        chunks=_TWO_CHUNKS,
    ),
    ScheduleSpec(
        name="v_min",
        description="a V with a third of 1f1b's activations, the least there is; suffers where F, I and W differ",
        summary="a third of `1f1b`'s memory as p grows",
        source="Qi et al., Pipeline Parallelism with Controllable Memory, 2024",
        formulas=_zero_bubble(
            _V_MIN_IDLE, "(D + 4) // 3 - (D % 3 == 2 and r % 3 == 0)", _V_MIN_IDLE, f"T >= D and {_EQUAL}"
        ),
        generate=lambda request: v_min(request.ranks, request.microbatches),
        default_chunks=2,
        chunks=_TWO_CHUNKS,
    ),
    ScheduleSpec(
        name="dualpipe_v",
        description="DualPipe in a V: one copy of the weights; its pairs of F and B one after the other",
        summary="DualPipe's order in a V",
        source="DeepSeek-AI, DualPipe, 2025; torch's ScheduleDualPipeV",
        formulas=_zero_bubble("(D - 1) * F / 2", "D + 0.5", "(D - 1) * F / 2", _EQUAL),
        generate=lambda request: dualpipe_v(request.ranks, request.microbatches),
        default_chunks=2,
        chunks=_TWO_CHUNKS,
        microbatches=Legal("at least 2 D", lambda ranks, microbatches: microbatches >= 2 * ranks),
    ),
    ScheduleSpec(
        name="hanayo",
        description="waves: schedule.chunks / 2 of them, each a V; more waves, smaller bubble, more messages",
        summary="waves, as many as half of `schedule.chunks`",
        source="Liu et al., Hanayo, 2023",
        formulas=None,
        generate=lambda request: hanayo(request.ranks, request.microbatches, request.chunks or 2),
        default_chunks=2,
        chunks=_EVEN_CHUNKS,
    ),
    ScheduleSpec(
        name="auto",
        description="the shortest of all published orders and of those that list scheduling finds, that fits",
        summary="the shortest that fits, for seconds of planning",
        figures=("", ""),
        source="a search over this table and over list scheduling on one, two and V-placed chunks",
        formulas=None,
        generate=_auto,
        keys=frozenset({"memory_limit"}),
        default_chunks=None,
        chunks=_ANY_CHUNKS,
        one_rank=True,
        by_plan=True,
    ),
    ScheduleSpec(
        name="varuna",
        description="every rank but the last recomputes its forward just before the backward: one activation at a time",
        summary="every forward twice; `schedule.opportunistic`: late gradients let forwards go first",
        source="Athlur et al., Varuna, 2022: its static order, and its run-time rule with schedule.opportunistic",
        formulas=None,
        generate=_varuna,
        keys=frozenset({"opportunistic", "memory_limit"}),
        constraint=_varuna_problems,
    ),
    ScheduleSpec(
        name="pipefb",
        description="forwards and backwards of a stage on different ranks: the weights twice, no activation waits",
        summary="backwards on other ranks than their forwards, recomputed; twice the weights",
        source="our reconstruction: backwards flow the way of the forwards, recomputed from inputs that are sent twice",
        formulas=None,
        generate=lambda request: pipefb(request.ranks, request.microbatches),
        searched=False,
    ),
    ScheduleSpec(
        name="pipefisher",
        description="1f1b or gpipe (schedule.base) with K-FAC's sums and inversions in the bubbles of several steps",
        summary="`1f1b` or `gpipe` (`schedule.base`) with the sums and inversions of `optimizer=kfac` in the bubbles",
        figures=("0.158, filled", "4 and more"),
        source="Osawa, Li and Hoefler, PipeFisher, 2023",
        formulas=None,
        generate=_pipefisher,
        keys=frozenset({"base"}),
        constraint=_pipefisher_problems,
        by_costs=True,
        searched=False,
    ),
    *BIDIRECTIONAL,
    PIPEDREAM_2BW,
    ScheduleSpec(
        name="from_file",
        description="the order written in a file (schedule.file), in torch's schedule CSV",
        summary="your own order",
        figures=("", ""),
        source="your file",
        formulas=None,
        generate=_generate_from_file,
        default_chunks=None,
        chunks=Legal("the file's", lambda ranks, chunks: True),
        microbatches=Legal("the file's", lambda ranks, microbatches: True),
        constraint=_fits_file,
        keys=frozenset({"file"}),
    ),
)

SEARCHED: tuple[ScheduleSpec, ...] = tuple(
    spec for spec in CATALOGUE if spec.searched and not (spec.by_plan or spec.by_costs or spec.default_chunks is None)
)
"""The published orders; ``auto`` chooses among them."""
