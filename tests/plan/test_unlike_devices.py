"""``hardware.devices``: order and cut against all of them, limits of memory by class, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
from plan_profiles import layer, model

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.errors import RequestError
from runner.plan.cut.chosen import with_partition
from runner.plan.make import make_plan, plan_problems
from runner.plan.render import to_table
from runner.plan.search import by_device
from runner.plan.values import RunPlan
from runner.profile import ModelProfile

Cut = tuple[int, ...]


def classes(*speeds: float, **more: Any) -> str:
    """A class for each speed, named a, b, c …; ``more`` are further figures of the classes by name."""
    names = "abcdefgh"[: len(speeds)]
    one = (f"{{name: {name}, speed: {speed}{more.get(name, '')}}}" for name, speed in zip(names, speeds, strict=True))
    return f"hardware.devices=[{', '.join(one)}]"


def planned(profile: ModelProfile, speeds: Sequence[float], *words: str, microbatches: int = 8) -> RunPlan:
    sizes = [f"schedule.microbatches={microbatches}", f"data.batch_size={microbatches}", "model=mlp"]
    config = resolve([f"parallelism.pipeline={len(speeds)}", classes(*speeds), *sizes, "memory_limit=1GB", *words])
    assert rules(config) == []
    return make_plan(config, profile)


def played(forward: Sequence[float], backward: Sequence[float], message: Sequence[float], count: int) -> float:
    """The length of 1f1b, from nothing but what each forward and backward waits for."""
    stages = len(forward)
    orders = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, count)
        row = [("F", each) for each in range(warm)]
        for each in range(count - warm):
            row += [("F", warm + each), ("B", each)]
        orders.append(row + [("B", each) for each in range(count - warm, count)])
    ends: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                op, each = orders[stage][at[stage]]
                beside = stage - 1 if op == "F" else stage + 1
                arrives = 0.0
                if 0 <= beside < stages:
                    if (op, beside, each) not in ends:
                        break
                    arrives = ends[op, beside, each] + message[min(stage, beside)]
                took = forward[stage] if op == "F" else backward[stage]
                free[stage] = ends[op, stage, each] = max(free[stage], arrives) + took
                at[stage] += 1
    return max(free)


def all_cuts(layers: int, stages: int) -> Iterator[Cut]:
    return ((0, *inner, layers) for inner in combinations(range(1, layers), stages - 1))


def drawn(seed: int) -> tuple[ModelProfile, tuple[float, ...], int, float]:
    """A random model, devices, micro-batches, and seconds of a link for a byte."""
    of = random.Random(seed)
    speeds = of.choice(
        [(0.25, 0.5, 1.0), (0.25, 0.25, 1.0), (0.5, 1.0), (0.3, 0.6, 0.9, 1.0), (0.2, 0.4, 0.6, 0.8, 1.0)]
    )
    rows = [
        layer(
            forward_seconds=of.uniform(0.5, 2),
            backward_seconds=of.uniform(1, 4),
            output_bytes=of.randrange(1, 9),
        )
        for _ in range(of.randrange(len(speeds) + 1, 10))
    ]
    return model(rows), speeds, of.randrange(2, 9), of.choice([0.0, 0.02, 0.1])


@pytest.mark.parametrize("seed", range(6))
def test_order_and_cut_are_the_best_of_all(seed: int) -> None:
    profile, speeds, count, each_byte = drawn(seed)
    link = [f"hardware.link_bytes_per_second={1 / each_byte}"] if each_byte else []
    plan = planned(profile, speeds, *link, microbatches=count)
    rows = profile.layers

    def length(order: Sequence[float], cut: Cut) -> float:
        parts = [rows[first:end] for first, end in zip(cut, cut[1:], strict=False)]
        forward = [sum(each.forward_seconds for each in part) / speed for part, speed in zip(parts, order, strict=True)]
        back = [sum(each.backward_seconds for each in part) / speed for part, speed in zip(parts, order, strict=True)]
        return played(forward, back, [part[-1].output_bytes * each_byte for part in parts[:-1]], count)

    every = [length(order, cut) for order in set(permutations(speeds)) for cut in all_cuts(len(rows), len(speeds))]
    order = [each.speed for each in plan.devices]
    assert length(order, (0, *(last + 1 for _, last in plan.partition))) == pytest.approx(plan.time.step_seconds)
    assert plan.time.step_seconds == pytest.approx(min(every), rel=1e-9)


def test_many_layers_are_cut_nearly_as_well_as_by_all_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1):
        profile, speeds, count, _ = drawn(seed)
        exact = planned(profile, speeds, microbatches=count).time.step_seconds
        with monkeypatch.context() as patched:
            patched.setattr(by_device, "_ALL", 0)
            found = planned(profile, speeds, microbatches=count).time.step_seconds
        assert exact <= found * (1 + 1e-12) <= exact * 1.05


@pytest.mark.parametrize("schedule", ["zb_v", "pipedream_2bw"])
def test_other_orders_are_no_slower_than_even_stages_on_any_order_of_devices(schedule: str) -> None:
    profile, words = model([layer()] * 8), (f"schedule={schedule}",)
    even = [
        planned(profile, (0.25, 1.0), *words, "partition=uniform", f"parallelism.devices=[{order}]").time.step_seconds
        for order in ("a,b", "b,a")
    ]
    assert planned(profile, (0.25, 1.0), *words).time.step_seconds < min(even)


SMALL = ", memory_bytes: 460"


def test_a_fast_device_with_little_memory_gets_what_fits_it() -> None:
    """A slow one with much memory beside it: what the fast one alone could not hold fits on both."""
    profile = model([layer()] * 6)
    sizes = ["schedule.microbatches=4", "data.batch_size=4", "model=mlp", "memory_limit=100kB"]
    alone = make_plan(resolve([*sizes, "parallelism.pipeline=1", classes(1.0, a=", memory_bytes: 700")]), profile)
    assert not alone.fits
    assert "needs" in alone.problems[0].line()
    both = make_plan(resolve([*sizes, "parallelism.pipeline=2", classes(0.25, 1.0, b=", memory_bytes: 700")]), profile)
    free = make_plan(resolve([*sizes, "parallelism.pipeline=2", classes(0.25, 1.0)]), profile)
    assert both.fits
    fast = [each.name for each in both.devices].index("b")
    assert both.memory.peak_bytes[fast] <= both.device_limits[fast] == 700
    assert both.device_limits[1 - fast] == 100_000
    assert max(free.memory.peak_bytes) > 700
    assert both.time.step_seconds > free.time.step_seconds
    none = make_plan(
        resolve([*sizes, "parallelism.pipeline=2", classes(0.25, 1.0, a=SMALL, b=", memory_bytes: 460")]), profile
    )
    assert not none.fits
    assert "460 B" in none.problems[0].line()


def test_a_plan_says_its_devices_and_its_request_gives_the_same_plan(tmp_path: Path) -> None:
    profile = model([layer()] * 12)
    words = ["model=mlp", "parallelism.pipeline=3", "parallelism.data=2", "schedule.microbatches=4", "memory_limit=1GB"]
    config = resolve(
        [*words, classes(0.25, 0.5, 1.0, a=", memory_bytes: 9e5, count: 2", b=", count: 2", c=", count: 2")]
    )
    plan = make_plan(config, profile)
    said = with_partition(config, plan.partition, plan.devices)
    assert said.parallelism.devices == [each.name for each in plan.devices]
    again = make_plan(said, profile)
    assert (again.time.step_seconds, again.partition) == (plan.time.step_seconds, plan.partition)
    document = plan.to_json()
    assert document["devices"] == [each.name for each in plan.devices for _ in range(2)]
    assert sorted(document["memory_limits_bytes"]) == [900_000] * 2 + [10**9] * 4
    assert "device" in to_table(plan)
    assert any("emulated" in line for line in plan.advice)
    plan.save(tmp_path)
    assert RunPlan.load(tmp_path) == plan


def test_many_unlike_devices_are_compared_in_blocks() -> None:
    words = ["model=mlp", "parallelism.pipeline=9", "memory_limit=1GB", "schedule.microbatches=9", "data.batch_size=9"]
    counts = ", ".join(
        f"{{name: {name}, speed: {speed}, count: 3}}" for name, speed in zip("abc", (0.3, 0.6, 1), strict=True)
    )
    plan = make_plan(resolve([*words, f"hardware.devices=[{counts}]"]), model([layer()] * 18))
    names = [each.name for each in plan.devices]
    assert sorted(names) == list("aaabbbccc")
    assert all(len(set(names[at : at + 3])) == 1 for at in (0, 3, 6))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([classes(0.0, 1.0)], "hardware.devices[0].speed = 0.0: must be above 0 and at most 1."),
        ([classes(0.5, 2.0)], "hardware.devices[1].speed = 2.0: must be above 0 and at most 1."),
        ([classes(0.5, 1.0, a=", count: 0")], "hardware.devices[0].count = 0: must be at least 1."),
        (
            [classes(0.5, 1.0, a=", memory_bytes: 0.5")],
            "hardware.devices[0].memory_bytes = 0.5: must be at least 1 byte.",
        ),
        ([classes(0.5, 1.0).replace("b", "a")], "hardware.devices[1].name = a: must not be the name of another class."),
        (["hardware.devices=[{speed: 0.5},{name: b}]"], "hardware.devices[0].name = : must be given."),
        (
            [classes(0.5, 0.7, 1.0)],
            "hardware.devices = [1 x a, 1 x b, 1 x c]: must have as many devices as there are ranks, 2;",
        ),
        (
            [classes(0.5, 1.0, a=", count: 3"), "parallelism.data=2"],
            "hardware.devices[0].count = 3: must be a multiple of parallelism.data, 2.",
        ),
        (["parallelism.devices=[a,b]"], "parallelism.devices = [a, b]: belongs to hardware.devices."),
        ([classes(0.5, 1.0), "parallelism.devices=[a,z]"], "must be classes of hardware.devices; z is none."),
        ([classes(0.5, 1.0), "parallelism.devices=[a,a]"], "must name the class of each rank of the pipeline"),
        ([classes(0.5, 1.0), "parallelism.tensor=2"], "parallelism.tensor = 2: must be 1 with hardware.devices."),
        ([classes(0.5, 1.0), "partition=memory"], "partition = memory: must be auto, uniform or manual"),
        (
            [classes(0.5, 1.0), "zero.stage=1", "parallelism.data=2"],
            "zero.stage = 1: must be null with hardware.devices.",
        ),
        (
            [classes(0.5, 1.0), "offload=activations_save_on_cpu"],
            "offload.activations = save_on_cpu: must be none with",
        ),
        ([classes(0.5, 1.0), "launcher=slurm"], "launcher.name = slurm: must be local with hardware.devices."),
        (
            [classes(0.5, 1.0), "parallelism=auto"],
            "hardware.devices = [1 x a, 1 x b]: must be empty with planner=joint.",
        ),
    ],
)
def test_what_cannot_be_planned_is_told(words: list[str], told: str) -> None:
    try:
        lines = [each.line() for each in rules(resolve(["model=mlp", "parallelism.pipeline=2", *words]))]
    except RequestError as error:
        lines = [each.line() for each in error.problems]
    assert [line for line in lines if told in line], lines


@pytest.mark.parametrize("schedule", ["chimera", "pipefisher", "varuna schedule.opportunistic=true"])
def test_schedules_that_do_not_tell_devices_apart_are_refused(schedule: str) -> None:
    words = [f"schedule={schedule.split()[0]}", *schedule.split()[1:]]
    config = resolve(["model=mlp", "parallelism.pipeline=2", "schedule.microbatches=4", classes(0.5, 1.0), *words])
    told = [each.line() for each in plan_problems(config, 8)]
    assert [line for line in told if "must be another with hardware.devices" in line], told


def test_recomputation_is_chosen_under_the_limit_of_its_device() -> None:
    profile = model([layer(saved_bytes=3000)] * 6)
    words = ["schedule.microbatches=4", "data.batch_size=4", "model=mlp", "memory_limit=1GB", "parallelism.pipeline=2"]
    device = classes(0.5, 1.0, a=", memory_bytes: 12000")
    plan = make_plan(resolve([*words, device, "activation_checkpoint=auto"]), profile)
    slow = [each.name for each in plan.devices].index("a")
    assert plan.fits
    assert plan.memory.peak_bytes[slow] <= 12_000 < plan.memory.peak_bytes[1 - slow]
