"""The recipe's recurrence, against the engine's own schedule, and its requests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from runner.recipes.asynchronous import claim, delay, figures, schedules
from runner.recipes.asynchronous.model import VOCABULARY, Batches, entropy, make_blocks
from runner.schedule import SPECS, build


def test_without_delay_it_is_plain_training() -> None:
    outcome = delay.train("SGD, momentum 0.9", 1, 0.05, steps=3, samples=2)
    model = make_blocks(delay.BLOCKS, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _, (tokens, following) in zip(range(3), Batches(2, 0), strict=False):
        loss = functional.cross_entropy(model(tokens).view(-1, VOCABULARY), following.reshape(-1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        losses.append(float(loss.detach()))
    assert outcome.curve == losses
    assert outcome.loss == pytest.approx(sum(losses) / 3)


@pytest.mark.costly
def test_the_first_stages_lack_as_many_steps_as_the_schedule_says() -> None:
    """In the first D - 1 steps the first stage reads its first weights, so that nothing but the others can change."""
    schedule = build("pipedream", ranks=4, microbatches=1)
    assert [schedule.version_read(stage, 9) for stage in range(4)] == [6, 7, 8, 9]
    curves = {depth: delay.train("AdamW", depth, 0.01, steps=3, samples=2).curve for depth in (1, 2, 16)}
    assert len({tuple(curve) for curve in curves.values()}) == 3
    assert len({curve[0] for curve in curves.values()}) == 1


def test_every_asynchronous_schedule_is_compared() -> None:
    asynchronous = {name for name, spec in SPECS.items() if spec.kind == "asynchronous"}
    compared = {asked.schedule for asked in schedules.REQUESTS.values()}
    assert compared == {"1f1b", *asynchronous}, "a new schedule has a request in recipes/asynchronous/schedules.py"
    for label, asked in schedules.REQUESTS.items():
        build(asked.schedule, ranks=schedules.STAGES, microbatches=asked.microbatches)
        assert schedules.SAMPLES % asked.parts == 0
        assert asked.base is None or (label != asked.base and asked.base in schedules.REQUESTS)
    assert 1.0 < entropy() < 1.2


def result(label: str, loss: float | None) -> schedules.Result:
    asked, curve = schedules.REQUESTS[label], [[8.0, 3.0], [22.0, 2.5], [38.0, 2.0]]
    found = (asked.schedule, "adamw", asked.rate, asked.base, 10, 40, loss, loss)
    return schedules.Result(label, *found, 4.0, [3, 2, 1, 0], [400, 100], [900, 901], curve)


def test_tables_and_figures_are_made_of_results(tmp_path: Path) -> None:
    made = [result(label, None if label == "ampnet, SGD 0.3" else 2.0) for label in schedules.REQUESTS]
    first, second, third, *_ = schedules.rows(made)
    assert first == ["`1f1b`", "10", "2.000", "2.000", "", "1.00", "", "4", "3 2 1 0", "400", "100", "900", "901"]
    assert second[4] == "+0.000"
    assert third[5:7] == ["0.57", "2.500"]
    by_rate = {line[0]: line[1:] for line in schedules.momentum_rows(made)}
    assert by_rate["`ampnet`"] == ["2.000", "2.000", "not finite"]
    assert by_rate["`pipemare` without correction"] == ["2.000"] * 3
    figures.draw_curves(made, tmp_path / "curves.svg")
    figures.draw_delays({"SGD": [(2.0, 0.1)] * 4 + [(float("inf"), float("nan"))]}, tmp_path / "delays.svg")
    assert min(each.stat().st_size for each in tmp_path.iterdir()) > 1000


def test_predicted_time_is_that_of_flushed_and_of_full_pipelines() -> None:
    """Four ranks, 16 samples, in forwards of four samples: 1F1B takes 7 x 3, small steps 4 x 4 x 3, a full pipe 12."""
    assert schedules.predicted_time("1f1b", 16) == pytest.approx(21)
    assert schedules.predicted_time("1f1b, small steps", 16) == pytest.approx(48)
    for label in ("pipedream", "pipedream_2bw", "wpipe"):
        assert schedules.predicted_time(label, 32) == pytest.approx(24)


def test_pipemares_losses_are_compared_with_the_noise_of_seeds() -> None:
    losses = {"1f1b": (1.0, 1.1, 1.2), "pipemare": (2.0, None, 2.2)}
    made = [
        claim.Outcome(label, seed, 1.0, loss, 0.0 if label == "pipemare" else None, [3, 0], weights)
        for label, weights in (("1f1b", [100, 50]), ("pipemare", [200, 50]))
        for seed, loss in zip(claim.SEEDS, losses[label], strict=True)
    ]
    base, other = claim.rows(made)
    assert base == ["`1f1b`", "1.000 1.100 1.200", "1.100 ± 0.100", "+0.000", "3 0", "", "1.00"]
    assert other == ["`pipemare`", "2.000 not finite 2.200", "2.100 ± 0.141", "+1.000", "3 0", "1.00", "1.67"]
    assert [row[0] for row in claim.rows(made[3:])] == ["`pipemare`"]


def test_bases_of_all_matrices_but_the_first_and_the_last_are_rotated() -> None:
    rotated, others = delay.OPTIMIZERS["AdamW, rotated bases"][0](make_blocks(2, 0), 0.01)
    shapes = [tuple(weight.shape) for group in rotated.param_groups for weight in group["params"]]
    assert shapes == [(16, 32)] + [(96, 32), (32, 32), (64, 32), (32, 64)] * 2
    assert sum(len(group["params"]) for group in others.param_groups) > len(shapes)
