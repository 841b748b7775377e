"""The time of moving tensors to the host and back is a part of a step of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from runner.engine.measure.timeline import StepTimes, Timeline
from runner.memory.apply.install import install
from runner.memory.solve.values import Segment
from runner.model.layers import build_stage, layers_of
from runner.strategy.zero.host_moves import measure_moves
from runner.training.measure.measures import RankMeasures, seconds_of_median_step


class Ticks:
    """A clock that is one second further whenever it is read."""

    now, behind = 0, 0.0

    def moment(self) -> float:
        self.now += 1
        return float(self.now)

    def seconds(self, moments: Sequence[float]) -> list[float]:
        return list(moments)


class Moves:
    """Counts moves."""

    made = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.made += 1
        yield


def test_moves_are_taken_out_of_the_part_that_they_are_in() -> None:
    """Moments are 1, 2, 3, …: an action of 3 s with a move of 1 s, which holds another; a move between; an update."""
    timeline = Timeline(Ticks())
    timeline.begin(0)  # 1
    start = timeline.moment()  # 2
    with timeline.moving(), timeline.moving():  # 3 to 4: the inner one is a part of the outer one, and reads no clock
        pass
    timeline.compute("F", 0, 0, start)  # 5
    with timeline.moving():  # 6 to 7
        pass
    start = timeline.moment()  # 8
    with timeline.moving():  # 9 to 10
        timeline.moment()
    timeline.add("optimizer", start)  # 12
    timeline.finish()
    (step,) = timeline.steps
    assert (step.compute, step.moved_in_compute) == (3.0, 1.0)
    assert (step.optimizer, step.moved_in_optimizer) == (4.0, 2.0)
    assert (step.moved_between, step.moved) == (1.0, 4.0)
    timeline.begin(1)
    timeline.finish()
    assert timeline.steps[1].moved == 0.0


def test_the_parts_add_up_with_what_is_moved() -> None:
    step = StepTimes(0, compute=5.0, optimizer=2.0, moved_in_compute=1.5, moved_in_optimizer=0.5, moved_between=0.25)
    rank = RankMeasures((step,), {}, 0, 0, {}, walls=(8.0,))
    parts = seconds_of_median_step([rank], [0], {0: 8.0})
    assert parts is not None
    assert {part: seconds for part, seconds in parts.items() if seconds} == pytest.approx(
        {"compute": 3.5, "optimizer": 1.5, "offload": 2.25, "rest": 0.75}
    )
    assert RankMeasures.of_plain(rank.to_plain()) == rank


@pytest.mark.parametrize("to_host", [False, True])
def test_every_saved_tensor_is_moved_there_and_back_within_a_measurement(to_host: bool) -> None:
    moves = Moves()
    stage = build_stage(layers_of(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), 0), 0, 1)
    install(stage, (Segment(0, 1),), to_host=to_host, moving=moves)
    output = stage(torch.ones(2, 3, requires_grad=True))
    forward = moves.made
    output.sum().backward()
    assert (forward > 0) == to_host
    assert moves.made == 2 * forward


class Host:
    """Stands for DeepSpeed's optimizer: its step copies twice, and its inner optimizer once."""

    cpu_offload = True

    def __init__(self) -> None:
        self.master, self.weights = torch.zeros(3), torch.zeros(3)

    def async_inplace_copy_grad_to_fp32_buffer_from_gpu(self, gradient: Tensor) -> None:
        self.master.copy_(gradient, non_blocking=True)
        self.master.mul_(2)

    def step(self) -> None:
        self._optimizer_step(0)
        buffer = self.master.to("cpu")
        self.weights.copy_(buffer)
        self.weights.data.copy_(self.master.data)

    def _optimizer_step(self, group: int) -> None:
        self.master.copy_(self.master + 1)


def test_copies_of_offloading_are_measured_and_the_update_is_not() -> None:
    host, moves = Host(), Moves()
    measure_moves(host, moves)
    host.async_inplace_copy_grad_to_fp32_buffer_from_gpu(torch.ones(3))
    assert moves.made == 1
    host.step()
    assert moves.made == 3
    assert host.weights.tolist() == [3.0, 3.0, 3.0]
    kept, moves = Host(), Moves()
    kept.cpu_offload = False
    measure_moves(kept, moves)
    kept.step()
    assert moves.made == 0
