"""Runs a model under the program that each strategy chooses for a budget and a link: bytes, moves, and seconds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from runner.errors import RequestError
from runner.memory.apply.host_buffers import HostBuffers
from runner.memory.apply.host_lanes import SlowLink, make_lane
from runner.memory.apply.install import StageOffload, install
from runner.memory.apply.mover import Mover
from runner.memory.apply.trip import Trip
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.offload import chain_program
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.program import forwards
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.strategy import Strategy
from runner.memory.solve.values import ActivationPlan, ChainProgram, Segment, StageChain
from runner.model.layers import StageModule, build_stage, layers_of
from runner.model.live_tracker import LiveTracker
from runner.model.seeds import mix_seed, seed_torch
from runner.plan.choices import ProgramChoice, program_cost
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers
from runner.recipes.rematerialization.measure import LOSS_BYTES
from runner.recipes.rematerialization.models import Task
from runner.recipes.rematerialization.paced import STEP_SECONDS, SlowDevice, step_flops, with_flops_as_seconds

__all__ = ["FLOPS_PER_SECOND", "Bench", "measure"]

FLOPS_PER_SECOND = 2e10
"""The speed of the device for which programs are chosen."""

_SCALARS = 64  # bytes that are left for the loss and its gradient, which no prediction counts


def _compared() -> dict[str, Strategy]:
    """The strategies by what an override says: rotor alone, which moves nothing, and every offload strategy
    but those that need several ranks."""
    kept = STRATEGIES["none"]
    alone = {name: each for name, each in OFFLOADS.items() if not (each.lends or each.recuts)}
    offloads = {f"offload.activations={name}": offload.over(kept) for name, offload in alone.items()}
    return {"activation_checkpoint=rotor": STRATEGIES["rotor"], **offloads}


def measure(
    task: Task, *, share: float, links: Sequence[float], steps: int = 0, step_seconds: float = STEP_SECONDS
) -> dict[str, Any]:
    """The document of one model: for each link the rows of all strategies.

    Args:
        task: the model.
        share: the budget, as a part of the peak of the run that keeps everything.
        links: speeds of the link in bytes per second.
        steps: steps of which the median time is taken, on a device and a link that are slower by one factor, see
            :class:`runner.recipes.rematerialization.paced.SlowDevice`; 0: no times are measured.
        step_seconds: seconds of a step that keeps everything on that device.

    Raises:
        RuntimeError: a program's gradients or running statistics are not those of the run that keeps everything.
    """
    bench = Bench(task, steps, step_seconds)
    budget = round(share * bench.plain.peak_bytes)
    rows = {f"{link:g}": list(bench.rows(budget, link)) for link in links}
    told = {"layers": bench.chain.last + 1, "plain_bytes": bench.plain.peak_bytes, "budget": budget, "steps": steps}
    return {**told, "plain_seconds": bench.plain_seconds, "links": rows}


@dataclass(frozen=True)
class _Run:
    """One forward and backward; bytes are those of tensors besides weights, gradients of weights, and the batch.

    Args:
        peak_bytes: the most that is alive.
        moved_bytes: what was moved, in both directions.
        result: gradients of all weights, and buffers.
    """

    peak_bytes: int
    moved_bytes: int
    result: tuple[Tensor, ...]


class Bench:
    """A model as one stage.

    Attributes:
        chain: the stage's layers.
        whole: the program that keeps everything.
        plain: the run that keeps everything.
        plain_seconds: the seconds that are predicted for it.
    """

    def __init__(self, task: Task, steps: int = 0, step_seconds: float = STEP_SECONDS) -> None:
        torch.manual_seed(0)
        sources = layers_of(task.build(), 0)
        profile = profile_layers(sources, *task.batch, task.loss, torch.float32)
        self._task, self._steps, self._step_seconds = task, steps, step_seconds
        self._device = SlowDevice(step_flops(profile) / step_seconds)
        self._stage = build_stage(sources, 0, len(sources) - 1)
        self.whole: ChainProgram = (Segment(0, len(sources) - 1),)
        self.chain = StageChain(profile, 0, len(sources) - 1, budget_bytes=0)
        self.plain = self._run(self.whole, None)
        self.chain = replace(self.chain, profile=with_flops_as_seconds(profile, FLOPS_PER_SECOND))
        self.plain_seconds = step_flops(profile) / FLOPS_PER_SECOND

    def rows(self, budget: int, link: float) -> Iterator[dict[str, Any]]:
        """The rows of all strategies that do not refuse the model, as one for convolutions refuses a GPT."""
        for name, strategy in _compared().items():
            with suppress(RequestError):
                yield self.row(name, strategy, budget, link)

    def solved(self, strategy: Strategy, budget: int, link: float) -> tuple[StageChain, ChainProgram]:
        """The stage with a budget and a link, and the program that a strategy chooses for it."""
        chain = replace(self.chain, budget_bytes=budget - _SCALARS, copy_seconds=lambda size: size / link)
        program = chain_program(ProgramChoice()(chain, strategy)[0]) if strategy.chooses else strategy(chain)
        return chain, program

    def row(self, name: str, strategy: Strategy, budget: int, link: float) -> dict[str, Any]:
        """What a strategy chooses and what it costs; ``measured_…`` is counted or timed, and absent if it is not."""
        chain, program = self.solved(strategy, budget, link)
        price, run = program_cost(chain, program), self._run(program, link)
        if len(run.result) != len(self.plain.result) or not all(map(torch.equal, run.result, self.plain.result)):
            raise RuntimeError(f"{name}: gradients or running statistics differ")
        found: dict[str, Any] = {
            "strategy": name,
            "fits": price.peak_bytes <= budget - _SCALARS,
            "moved_layers": sum(each.moved for each in program),
            "forwards_again": forwards(program) - forwards(self.whole),
            "predicted_bytes": price.peak_bytes + LOSS_BYTES,
            "measured_bytes": run.peak_bytes,
            "predicted_moved": 2 * price.moved_bytes,
            "measured_moved": run.moved_bytes,
            "predicted_time": price.seconds / self.plain_seconds,
        }
        if self._steps:
            found["measured_time"] = self._seconds(program, link) / self._step_seconds
        return found

    def _run(self, program: ChainProgram, link: float | None) -> _Run:
        stage, mover, step = self.prepared(program, link)
        with LiveTracker() as tracker:
            step()
        if mover is not None:
            mover.require_empty()
        gradients = (parameter.grad for parameter in stage.parameters())
        result = tuple(value for value in (*gradients, *stage.buffers()) if value is not None)
        return _Run(tracker.peak, mover.bytes_moved if mover is not None else 0, result)

    def _seconds(self, program: ChainProgram, link: float) -> float:
        """The median seconds of a step on the slow device, beside a link that is slower by the same factor."""
        slow_link = link * self.plain_seconds / self._step_seconds
        _, _, step = self.prepared(program, slow_link)
        found = []
        for _ in range(self._steps + 1):
            start = time.perf_counter()
            with self._device:
                step()
            found.append(time.perf_counter() - start)
        return median(found[1:])

    def prepared(self, program: ChainProgram, link: float | None) -> tuple[StageModule, Mover | None, _Step]:
        """A copy of the stage with the program, what moves its tensors, and a function that runs a step.

        Args:
            program: of all layers.
            link: the link's bytes per second; None: it is not slowed down.
        """
        stage, task = copy.deepcopy(self._stage), self._task
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        offload = _offload(self.chain.profile, program, link)
        install(stage, program, offload=offload)
        inputs, targets = task.batch

        def step() -> None:
            if offload is None:
                torch.autograd.backward(task.loss(stage(inputs, _seed_layer), targets))
                return
            trip = Trip(offload.mover, [*stage.parameters(), *stage.buffers(), inputs])
            with offload.stages[stage].on(trip):
                loss = task.loss(stage(inputs, _seed_layer), targets)
            trip.expect_backward(all_at_once=False)
            torch.autograd.backward(loss)

        return stage, offload.mover if offload is not None else None, step


_Step = Callable[[], None]


def _offload(profile: ModelProfile, program: ChainProgram, link: float | None) -> StageOffload | None:
    """What moves the tensors of a program, with buffers for as many bytes as are planned; None if nothing is moved."""
    moved = [row.moved_bytes for row in adjusted(profile, ActivationPlan((program,))).layers]
    if not any(each.moved for each in program):
        return None
    device = torch.device("cpu")
    lanes = make_lane(device, SlowLink(bytes_per_second=link)), make_lane(device, SlowLink(bytes_per_second=link))
    return StageOffload(Mover(device, HostBuffers(sum(moved)), lanes, max(moved)))


def _seed_layer(index: int) -> None:
    seed_torch(mix_seed(0, index))
