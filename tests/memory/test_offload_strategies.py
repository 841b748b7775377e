"""Offload strategies of single publications: what each promises, beside others and every possible program."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from plan_profiles import layer, model
from test_offload_choice import chain_of, chosen, moved, plain, planned, with_budget, within

from runner.errors import RequestError
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.program import forwards
from runner.memory.solve.values import ChainProgram, Segment, StageChain
from runner.plan.choices import ProgramChoice, program_cost


def heavy_and_light(kinds: str, light_bytes: int = 110) -> StageChain:
    """A chain with a heavy layer for each H, and a light one for each L."""
    rows = [
        layer(
            saved_bytes=500 if kind == "H" else light_bytes,
            trained_shapes=((8, 8),) if kind == "H" else ((8,),),
            forward_seconds=4.0 if kind == "H" else 0.5,
            backward_seconds=8.0 if kind == "H" else 1.0,
        )
        for kind in kinds
    ]
    return StageChain(model(rows), 0, len(rows) - 1, {}, 0)


@pytest.mark.parametrize(("speed", "in_flight"), [(None, 3), (50.0, 1), (1000.0, 3)])
def test_one_by_one_takes_less_memory_and_more_time(speed: float | None, in_flight: int) -> None:
    for seed in range(6):
        chain = chain_of(seed, 6, 0, speed, in_flight)
        alone, several = (
            program_cost(chain, OFFLOADS[name].move(chain, plain(chain))) for name in ("vdnn_all", "async")
        )
        assert alone.moved_bytes == several.moved_bytes
        assert alone.peak_bytes <= several.peak_bytes
        assert alone.seconds >= several.seconds - 1e-9


def test_one_by_one_fewer_small_loads_are_on_their_way() -> None:
    sizes = (1010, 110, 110, 110, 110, 110)
    rows = [layer(saved_bytes=size, saves_input=False, saves_output=False) for size in sizes]
    rows[-1] = replace(rows[-1], forward_transient_bytes=5000)  # then four small loads are leaving, or one
    chain = StageChain(model(rows), 0, 5)
    alone, several = (program_cost(chain, OFFLOADS[name].move(chain, plain(chain))) for name in ("vdnn_all", "async"))
    assert several.peak_bytes - alone.peak_bytes == 3 * 100


def test_convolutions_alone_are_moved_and_a_model_without_any_is_refused() -> None:
    shapes = [((8, 3, 3, 3), (8,)), ((8,),), ((4, 8, 5),), ((10, 8), (10,))]
    rows = [layer(saved_bytes=510, saves_input=False, saves_output=False, trained_shapes=each) for each in shapes]
    chain = StageChain(model(rows), 0, 3)
    program = OFFLOADS["vdnn_conv"].move(chain, plain(chain))
    assert moved(program) == [0, 2]
    assert all(each.one_by_one == each.moved for each in program)
    without = StageChain(model([rows[1], rows[3]]), 0, 1)
    with pytest.raises(RequestError, match="a model without convolutions"):
        OFFLOADS["vdnn_conv"].move(without, plain(without))


@pytest.mark.parametrize("speed", [None, 200.0])
def test_vdnn_without_waits_is_never_slower(speed: float | None) -> None:
    for seed in range(2):
        choose = ProgramChoice()
        for chain in with_budget(chain_of(seed, 6, 0, speed), OFFLOADS["vdnn_dynamic"]):
            fast, slow = (chosen(chain, OFFLOADS[name], choose)[1] for name in ("vdnn_pp", "vdnn_dynamic"))
            assert within(chain, fast.peak_bytes) >= within(chain, slow.peak_bytes)
            assert fast.seconds <= slow.seconds


def test_light_layers_run_again_once_or_up_to_each_by_what_they_save() -> None:
    for light_bytes, times in ((110, 1), (400, 1 + 2 + 3)):  # forwards of the three light layers beyond the first
        chain = heavy_and_light("HLLLH", light_bytes)
        offers = OFFLOADS["superneurons"].candidates
        assert offers is not None
        programs = {each.name: each.program for each in offers(chain, plain(chain))}
        cost = programs["superneurons, again by cost"]
        assert isinstance(cost, tuple)
        assert moved(cost) == [0, 1, 4]
        assert [each.recompute for each in cost] == [False, True, False]
        again = forwards(cost) - forwards(plain(chain))
        assert again == (3 if times == 1 else 3 + 2 + 1)


@pytest.mark.parametrize(("kinds", "speed"), [("HLLHLH", None), ("LLHLLLHL", 50.0), ("HHH", 1000.0), ("LLL", 200.0)])
def test_moves_with_light_layers_again_never_take_more_than_nothing(kinds: str, speed: float | None) -> None:
    chain = heavy_and_light(kinds, 200)
    chain = replace(chain, copy_seconds=lambda size: size / speed if speed else 0.0)
    most = program_cost(chain, plain(chain))
    assert chosen(replace(chain, budget_bytes=most.peak_bytes), OFFLOADS["superneurons"])[1].seconds == most.seconds
    assert chosen(chain, OFFLOADS["superneurons"])[1].peak_bytes <= most.peak_bytes


def every_program(chain: StageChain) -> list[ChainProgram]:
    """Every layer kept, moved, moved one by one, or run again."""
    ways = [(False, False, False), (True, False, False), (True, True, False), (False, False, True)]
    return [
        tuple(
            Segment(at, at, moved=moves, one_by_one=alone, recompute=again)
            for at, (moves, alone, again) in enumerate(each)
        )
        for each in product(ways, repeat=len(chain.layers))
    ]


@pytest.mark.parametrize(("count", "bound", "speed"), [(4, 0.0, 100.0), (5, 0.05, None)])
def test_the_genetic_search_is_beside_every_program(count: int, bound: float, speed: float | None) -> None:
    choose, chain = ProgramChoice(), chain_of(1, count, 0, speed)
    costs = [program_cost(chain, each) for each in every_program(chain)]
    for limited in with_budget(chain, OFFLOADS["greedy"]):
        best = min(cost.seconds for cost in costs if within(limited, cost.peak_bytes))
        found = chosen(limited, OFFLOADS["swapadvisor"], choose)[1]
        assert within(limited, found.peak_bytes)
        assert best - 1e-9 <= found.seconds <= (1 + bound) * best


def test_the_genetic_search_is_never_slower_than_its_first_parents() -> None:
    choose = ProgramChoice()
    for chain in with_budget(chain_of(3, 12, 0, 100.0, 2), OFFLOADS["greedy"]):
        found, greedy = (chosen(chain, OFFLOADS[name], choose)[1] for name in ("swapadvisor", "greedy"))
        assert found.seconds <= greedy.seconds


@pytest.mark.costly
def test_what_waits_longest_is_moved_first() -> None:
    layout = ("parallelism.pipeline=2", "schedule.microbatches=4", "schedule=interleaved_1f1b", "partition=uniform")
    kept, everything = planned(*layout), planned(*layout, "offload=activations_async")
    limit = (max(kept.peak_memory_bytes) + max(everything.peak_memory_bytes)) // 2
    longest, equal = (
        planned(*layout, f"offload.activations={name}", f"memory_limit={limit}") for name in ("pipeoffload", "greedy")
    )
    assert longest.fits
    for rank in range(2):
        early, late = (longest.figures[stage].moved_bytes for stage in longest.schedule.stages_of(rank))
        assert longest.in_flight[rank] > longest.in_flight[rank + 2]
        assert late == 0
        assert (early > 0) == (kept.peak_memory_bytes[rank] > limit)  # a rank into which everything fits keeps it
    assert longest.host_activation_bytes < equal.host_activation_bytes
