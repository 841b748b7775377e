"""Runs a model under the program of each strategy: bytes at the peak, FLOPs, and gradients beside plain ones."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from runner.errors import RequestError
from runner.memory.apply.install import install
from runner.memory.apply.operators import InPlaceError
from runner.memory.apply.rehearse import rehearse_stage
from runner.memory.solve.graph.evicting import SCORES
from runner.memory.solve.policies import solve, strategy_of
from runner.memory.solve.program import DEEPEST, depth, forwards
from runner.memory.solve.values import PolicyOptions, Program, Segment, StageChain, StageProgram
from runner.model.layers import StageModule, build_stage, layers_of
from runner.model.live_tracker import LiveTracker
from runner.model.seeds import mix_seed, seed_torch
from runner.plan.choices import ProgramChoice, program_cost
from runner.profiling.model import profile_layers
from runner.recipes.rematerialization.models import Task
from runner.recipes.rematerialization.paced import LAUNCHES, STEP_SECONDS, SlowDevice, step_flops, with_flops_as_seconds

__all__ = ["BUDGETED", "BUDGETS", "LOSS_BYTES", "STRATEGIES", "measure"]

BUDGETS = 20
"""Budgets of the grid: these equal parts of the plain peak, from all of it downwards."""

LOSS_BYTES = 8
"""Bytes of a loss and its gradient, which a plan adds to what it predicts of the layers."""

_SCALARS = 64  # bytes that are left for the loss and its gradient, which no prediction counts

STRATEGIES: Mapping[str, PolicyOptions] = {
    "none": PolicyOptions("none"),
    "full": PolicyOptions("full"),
    "periodic every=4": PolicyOptions("periodic", every=4),
    "chen_sqrt": PolicyOptions("chen_sqrt"),
    "chen_greedy": PolicyOptions("chen_greedy"),
    "chen_recursive cuts=2": PolicyOptions("chen_recursive", cuts=2),
    "bisect": PolicyOptions("bisect"),
    "revolve slots=2": PolicyOptions("revolve", slots=2),
    "revolve slots=3": PolicyOptions("revolve", slots=3),
    "revolve slots=5": PolicyOptions("revolve", slots=5),
    "het_time slots=3": PolicyOptions("het_time", slots=3),
    "bptt msm states=12": PolicyOptions("bptt", variant="msm", states=12),
}
"""Strategies without a budget, by what a table shows."""

BUDGETED: Mapping[str, PolicyOptions] = {
    "rotor": PolicyOptions("rotor"),
    "auto": PolicyOptions("auto"),
    "rockmate": PolicyOptions("rockmate"),
    "kusumoto": PolicyOptions("kusumoto"),
    "kusumoto approximate": PolicyOptions("kusumoto", approximate=True),
    "checkmate": PolicyOptions("checkmate"),
    "monet": PolicyOptions("monet"),
    "treewidth": PolicyOptions("treewidth"),
    **{f"dtr {score}": PolicyOptions("dtr", score=score) for score in SCORES},
    "coop": PolicyOptions("coop"),
    "mimose": PolicyOptions("mimose"),
}
"""Strategies that choose under a budget, by what a table shows."""

_TIMED = 3  # runs of each program of which the median counts


@dataclass(frozen=True)
class Run:
    """One forward and backward. Bytes are those of tensors besides weights, gradients of weights, and the batch.

    Args:
        peak_bytes: the most that is alive.
        flops: what matrix products, convolutions and attention take.
        forwards: how often a layer has run forward, of all layers together.
        result: gradients of all weights, and buffers.
    """

    peak_bytes: int
    flops: int
    forwards: int
    result: tuple[Tensor, ...]


def measure(
    task: Task,
    strategies: Mapping[str, PolicyOptions] = STRATEGIES,
    budgets: int = BUDGETS,
    budgeted: Sequence[str] = tuple(BUDGETED),
    *,
    timed: bool = False,
) -> dict[str, Any]:
    """The document of one model: ``strategies`` by name, and the choices of those that choose by ``budget``.

    Args:
        task: the model.
        strategies: by name; each is one program.
        budgets: the number of budgets.
        budgeted: names of strategies that choose under a budget, see :data:`BUDGETED`.
        timed: whether steps are timed, on a slow device, see
            :class:`runner.recipes.rematerialization.paced.SlowDevice`.

    Raises:
        RuntimeError: a program's gradients or running statistics are not those without a strategy.
    """
    bench = _Bench(task, timed=timed)
    found = {}
    for name, options in strategies.items():
        (program,) = solve(bench.chain.profile, [(0, bench.chain.last)], options).stages
        if depth(program) <= DEEPEST:
            found[name] = bench.row(program)
    plain = bench.plain.peak_bytes
    grid = [plain * (budgets - number) // budgets for number in range(budgets)]
    chosen, refused = {}, {}
    for name in budgeted:
        try:
            chosen[name] = [bench.under(name, budget) for budget in grid]
        except RequestError as error:
            refused[name] = " ".join(problem.line() for problem in error.problems)
        except InPlaceError as error:
            refused[name] = f"{error}."
    told = {"strategies": found, "budgets": chosen, "refused": refused}
    return {"layers": bench.chain.last + 1, "plain_bytes": plain, **told}


class _Bench:
    """A model as one stage; it runs each program once.

    Attributes:
        chain: the stage's layers, with FLOPs for seconds.
        plain: the run that keeps everything.
    """

    def __init__(self, task: Task, *, timed: bool) -> None:
        torch.manual_seed(0)
        sources = layers_of(task.build(), 0)
        profile = with_flops_as_seconds(profile_layers(sources, *task.batch, task.loss, torch.float32), 1.0)
        self._task, self._timed = task, timed
        self._stage = build_stage(sources, 0, len(sources) - 1)
        self._device = SlowDevice(step_flops(profile) / STEP_SECONDS, LAUNCHES)
        self._choosing: dict[str, ProgramChoice] = {}
        self._whole = (Segment(0, len(sources) - 1),)
        self._rows: dict[Program, dict[str, int | float]] = {}
        self.chain = StageChain(profile, 0, len(sources) - 1, budget_bytes=0, may_run_graphs=True)
        self.plain = _run(self._stage, task, self._whole)

    def under(self, name: str, budget: int) -> dict[str, Any]:
        """What a strategy chooses for a budget; only what it needs at least if nothing is within the budget."""
        options = BUDGETED[name]
        chain = replace(self.chain, budget_bytes=budget - _SCALARS, options=options.values)
        choose = self._choosing.setdefault(name, ProgramChoice())
        program, choice = choose(chain, strategy_of(options))
        told = {"budget": budget, "strategy": choice.chosen.name}
        if choice.chosen.peak_bytes > budget - _SCALARS:
            return {**told, "least_bytes": choice.chosen.peak_bytes}
        return {**told, **self.row(program)}

    def row(self, program: Program) -> dict[str, int | float]:
        """Bytes at the peak, FLOPs as parts of the plain ones, and forwards beyond the first of each layer."""
        if program not in self._rows:
            self._rows[program] = self._measured(program)
        return self._rows[program]

    def _seconds(self, program: Program) -> float:
        """The median seconds of a forward and backward on the slow device, after one that is not counted."""
        prepared, found = _prepared(self._stage, program), []
        for _ in range(1 + _TIMED):
            began = perf_counter()
            with self._device:
                _step(prepared, self._task)
            found.append(perf_counter() - began)
        return median(found[1:])

    def _rehearsed(self, program: Program) -> StageChain:
        """The chain, with what a rehearsal tells of a program that decides in the run."""
        if not isinstance(program, StageProgram) or not program.wants_rehearsal:
            return self.chain
        task = self._task
        others = layers_of(task.build(), 0)  # its running statistics change
        known = rehearse_stage(others, *task.batch, task.loss, program)
        return replace(self.chain, profile=replace(self.chain.profile, rehearsals=(known,)))

    def _measured(self, program: Program) -> dict[str, int | float]:
        predicted, flops, _ = program_cost(self._rehearsed(program), program)
        plain_flops = program_cost(self.chain, self._whole).seconds
        run = _run(self._stage, self._task, program)
        if len(run.result) != len(self.plain.result) or not all(map(torch.equal, run.result, self.plain.result)):
            raise RuntimeError("gradients or running statistics differ")
        seconds = {"measured_seconds": self._seconds(program) / STEP_SECONDS} if self._timed else {}
        return {
            **seconds,
            "predicted_bytes": predicted + LOSS_BYTES,
            "measured_bytes": run.peak_bytes,
            "predicted_flops": flops / plain_flops,
            "measured_flops": run.flops / self.plain.flops,
            "predicted_forwards": forwards(program) - forwards(self._whole),
            "measured_forwards": run.forwards - self.plain.forwards,
        }


def _run(stage: StageModule, task: Task, program: Program) -> Run:
    """A forward and backward of a copy of the stage, whose gradients are there before, as in a pipeline's flat buffers.

    It is run twice: FLOPs and forwards are counted in a run of their own.
    """
    counting, calls = _prepared(stage, program), Counter[str]()
    for layer in counting.layers:
        layer.register_forward_pre_hook(lambda module, given: calls.update(["forward"]))
    with FlopCounterMode(display=False) as counter:
        _step(counting, task)
    prepared = _prepared(stage, program)
    with LiveTracker() as tracker:
        _step(prepared, task)
    gradients = (parameter.grad for parameter in prepared.parameters())
    result = tuple(value for value in (*gradients, *prepared.buffers()) if value is not None)
    return Run(tracker.peak, counter.get_total_flops(), calls["forward"], result)


def _prepared(stage: StageModule, program: Program) -> StageModule:
    made = copy.deepcopy(stage)
    install(made, program)
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return made


def _step(stage: StageModule, task: Task) -> None:
    inputs, targets = task.batch
    torch.autograd.backward(task.loss(stage(inputs, _seed_layer), targets))


def _seed_layer(index: int) -> None:
    seed_torch(mix_seed(0, index))
