"""Planners of unlike devices: HetPipe's groupings and Pipe-torch's stages against every order, cut and sharing."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import pytest
from planning_problems import cuts, figures, problem, shares

from runner.cli.main import main
from runner.plan.planners.published.chain import Chain
from runner.plan.planners.published.hetpipe import compared, plan
from runner.plan.planners.published.pipe_torch import in_best_order
from runner.plan.planners.published.pipe_torch import plan as plan_without_overlap
from runner.plan.planners.values import Device, PlanningProblem, problem_from_json

V, R, G, Q = (Device(name, speed, 10**9) for name, speed in zip("vrgq", (1.0, 0.7, 0.5, 0.25), strict=True))
TWO = [[V, V], [Q, Q]], [[V, Q], [V, Q]], [[V, Q], [V, Q]]
FOUR = (
    [[V, V], [R, R], [G, G], [Q, Q]],
    [[V, R, G, Q]] * 2,
    [[V, Q], [V, Q], [R, G], [R, G]],
)


def seconds_of(of: PlanningProblem, workers: list[list[Device]], count: int) -> float | None:
    """What a step takes the slowest worker, from nothing but the figures of layers; None if a worker fits nothing."""
    samples = of.batch / count
    rows, each, steps = figures(of, samples), count // len(workers), []
    saved = [samples * line.each for line in of.divisions[0].kept[0].saved]
    for own in workers:
        best = None
        for order in set(permutations(own)):
            for inner in combinations(range(1, len(rows)), len(own) - 1):
                bounds = list(zip((0, *inner), (*inner, len(rows)), strict=True))
                for under_way in range(1, min(2 * len(own) - 1, each) + 1):
                    stages, fits, way = [], True, 0.0
                    for at, ((first, end), device) in enumerate(zip(bounds, order, strict=True)):
                        compute = sum(seconds for seconds, _, _ in rows[first:end]) / device.speed
                        leaving = 2 * rows[end - 1][2] if end < len(rows) else 0.0
                        entering = 2 * rows[first - 1][2] if first else 0.0
                        held = min(under_way, 2 * (len(own) - at) - 1) * sum(saved[first:end])
                        states = 4 * sum(weight for _, weight, _ in rows[first:end])
                        fits &= states + held + samples * 0.1 <= device.memory
                        stages.append(compute + entering + leaving)
                        way += compute + leaving
                    pushed = max(2 * sum(weight for _, weight, _ in rows[a:b]) / 4.0 for a, b in bounds)
                    micro = max(*stages, way / under_way)
                    if fits and (best is None or micro < best[0]):
                        best = micro, pushed if len(workers) > 1 else 0.0
        if best is None:
            return None
        steps.append(each * best[0] + best[1])
    return max(steps)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cases", [TWO, FOUR], ids=["two classes", "four classes"])
def test_groupings_are_the_best_of_every_order_and_cut(seed: int, cases: tuple[list[list[Device]], ...]) -> None:
    devices = tuple(device for worker in cases[0] for device in worker)
    of = problem(seed, layers=5)
    light = replace(of.divisions[0], weight=(0.0,) * 5)  # cuts that are as fast push different weights
    of = replace(of, divisions=(light,), devices=devices, ranks=len(devices), batch=16)
    assert problem_from_json(of.to_json()) == of
    found = {name: each.seconds for name, each in compared(of, 16).items()}
    wanted = {name: seconds_of(of, workers, 16) for name, workers in zip(("NP", "ED", "HD"), cases, strict=True)}
    assert found == pytest.approx(wanted)
    answer = plan(of)
    assert answer is not None
    alike = {name for name, workers in zip(("NP", "ED", "HD"), cases, strict=True) if len({*map(tuple, workers)}) == 1}
    assert bool(answer.needs) == (min(found, key=lambda name: (found[name], name not in alike)) not in alike)


def test_what_does_not_fit_a_class_is_left_out() -> None:
    of = problem(1, layers=5)
    weights = 4 * sum(of.divisions[0].weight)
    small = Device("small", 1.0, int(0.4 * weights))
    large = Device("large", 0.5, int(2 * weights))
    of = replace(of, devices=(small, small, large, large), batch=16)
    found = compared(of, 16)
    assert "NP" not in found, "both small devices together hold less than the model"
    assert found["ED"].workers == 2
    assert found["ED"].seconds == pytest.approx(seconds_of(of, [[small, large]] * 2, 16), rel=0.01)
    tiny = large._replace(memory=int(0.1 * weights))
    assert plan(replace(of, devices=(small, small, tiny, tiny))) is None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("devices", [(V, G, Q), (V, V, Q, Q), (V, R, G, Q)], ids=len)
def test_pipe_torch_takes_the_best_of_every_order_cut_and_sharing(seed: int, devices: tuple[Device, ...]) -> None:
    of = replace(problem(seed, layers=5), devices=devices, ranks=len(devices))
    rows, found = figures(of, 2.0), []
    for order in set(permutations(devices)):
        for ranges in cuts(5):
            for own in shares(len(ranges), len(order)) if len(ranges) <= len(order) else ():
                worst, begin = 0.0, 0
                for (first, end), m in zip(ranges, own, strict=True):
                    slowest = min(device.speed for device in order[begin : begin + m])
                    begin += m
                    compute = sum(seconds for seconds, _, _ in rows[first:end]) / slowest
                    sums = 2 * (m - 1) / m * sum(weight for _, weight, _ in rows[first:end]) / 4.0
                    entering = 2 * rows[first - 1][2] if first else 0.0
                    leaving = 2 * rows[end - 1][2] if end < 5 else 0.0
                    worst = max(worst, (compute + sums) / m + entering + leaving)
                found.append(worst)
    (seconds, _, _), _ = in_best_order(Chain(of, of.divisions[0], 2.0), devices)
    assert seconds == pytest.approx(min(found), rel=1e-12)


def test_what_pipe_torch_finds_runs_where_stages_have_one_device_each() -> None:
    of = problem(0, layers=5)
    heavy = replace(of.divisions[0], weight=(50.0,) * 5, gradient=(50.0,) * 5)  # no stage has replicas: sums are long
    answer = plan_without_overlap(replace(of, divisions=(heavy,), devices=(V, G, Q), ranks=3))
    assert (answer.pipeline, answer.data, answer.needs) == (3, 1, ())
    assert sorted(answer.devices) == ["g", "q", "v"]
    light = replace(of.divisions[0], gradient=(0.0,) * 5, boundary=(9.0,) * 5)  # one stage has all devices
    answer = plan_without_overlap(replace(of, divisions=(light,), devices=(V, V, Q), ranks=3))
    assert "devices of several classes" in answer.needs[0]


WORDS = ("plan", "model=mlp", "parallelism=auto", "hardware=a100_80gb")
OLD_AND_NEW = "hardware.devices=[{name: old, speed: 0.25, count: 2},{name: new, count: 2}]"


@pytest.mark.costly
def test_a_request_of_unlike_devices_gets_its_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "planner=hetpipe", OLD_AND_NEW]) == 0
    told = capsys.readouterr().out
    assert "parallelism.pipeline=2 parallelism.data=2" in told
    assert "'parallelism.devices=[" in told


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((OLD_AND_NEW,), "hardware.devices = [2 x old, 2 x new]: must be empty with planner=joint."),
        ((OLD_AND_NEW, "planner=dapple"), "must be empty with planner=dapple."),
        ((OLD_AND_NEW, "planner=hetpipe", "parallelism.ranks=3"), "must have 3 devices, as there are ranks"),
        ((OLD_AND_NEW, "planner=hetpipe", "parallelism.devices=[old,new]"), "must be null with parallelism=auto."),
        (("planner=hetpipe", OLD_AND_NEW.replace("0.25", "0")), "hardware.devices[0].speed = 0.0: must be above 0"),
    ],
)
def test_what_a_planner_cannot_share_out_is_told(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *words]) == 2
    assert line in capsys.readouterr().err
