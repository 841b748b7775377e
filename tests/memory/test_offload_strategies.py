"""Offload strategies of single publications: what each promises, beside others and every possible program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_profiles import layer, model
from test_offload_choice import chain_of, chosen, moved, plain, with_budget, within

from runner.errors import RequestError
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.values import StageChain
from runner.plan.choices import ProgramChoice, program_cost

LINKS = [None, 50.0, 200.0, 1000.0]


@pytest.mark.parametrize("speed", LINKS)
@pytest.mark.parametrize("in_flight", [1, 3])
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


@pytest.mark.parametrize("speed", LINKS)
def test_vdnn_without_waits_is_never_slower(speed: float | None) -> None:
    for seed in range(4):
        choose = ProgramChoice()
        for chain in with_budget(chain_of(seed, 6, 0, speed), OFFLOADS["vdnn_dynamic"]):
            fast, slow = (chosen(chain, OFFLOADS[name], choose)[1] for name in ("vdnn_pp", "vdnn_dynamic"))
            assert within(chain, fast.peak_bytes) >= within(chain, slow.peak_bytes)
            assert fast.seconds <= slow.seconds
