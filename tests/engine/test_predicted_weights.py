"""Predicted weights against a recurrence in plain PyTorch, stage by stage and version by version."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from late_weights import (
    STEPS,
    Batches,
    Formula,
    Gap,
    Kept,
    Optimizer,
    Weights,
    make_batches,
    make_model,
    recurrence,
    train,
)
from pytorch_optimizer import AdaBelief as LibrarysAdaBelief
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from runner.config.schema import OptimizerConfig, RunConfig, ScheduleConfig, WeightPredictionConfig
from runner.model.live_tracker import LiveTracker
from runner.optim.catalogue.drift import DRIFT
from runner.optim.catalogue.registry import PREDICTIONS, optimizer_of
from runner.optim.forecast import Forecast
from runner.plan.prediction import prediction_of
from runner.schedule import build

SECTIONS = {
    "sgd": OptimizerConfig(name="sgd", lr=0.05, momentum=0.9),
    "rmsprop": OptimizerConfig(name="rmsprop", lr=0.005),
    "adam": OptimizerConfig(name="adam", lr=0.01),
    "adamw": OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.1),
    "adabelief": OptimizerConfig(name="adabelief", lr=0.01, eps=1e-16),
}
PLAIN: Mapping[str, Optimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.005),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adabelief": partial(LibrarysAdaBelief, lr=0.01, eps=1e-16),
}
RATES = {name: section.lr for name, section in SECTIONS.items()}


# The formulas, as the papers have them


def direction(name: str, state: Mapping[str, Any], gradient: Tensor, steps: int) -> Tensor:
    """The last step's direction, after ``steps`` steps."""
    if name == "sgd":
        return state["momentum_buffer"]  # type: ignore[no-any-return]
    if name == "rmsprop":
        return gradient / (state["square_avg"].sqrt() + 1e-8)  # type: ignore[no-any-return]
    second, eps = ("exp_avg_var", 1e-16) if name == "adabelief" else ("exp_avg_sq", 1e-8)
    mean = state["exp_avg"] / (1 - 0.9**steps)
    root: Tensor = (state[second] / (1 - 0.999**steps)).sqrt()
    moved: Tensor = mean / (root + eps)
    return moved


def along(name: str) -> Formula:
    def moved(kept: Kept, steps: int, gap: float) -> Tensor:
        return kept.weight - gap * RATES[name] * direction(name, kept.state, kept.gradient, steps)

    return moved


def coasting(name: str) -> Formula:
    """What zero gradients would make of a weight."""
    rate = RATES[name]

    def moved(kept: Kept, steps: int, gap: int) -> Tensor:
        weight, state = kept.weight, kept.state
        if name == "sgd":
            far: Tensor = weight - rate * (0.9 - 0.9 ** (gap + 1)) / (1 - 0.9) * state["momentum_buffer"]
            return far
        for i in range(1, gap + 1):
            corrected = (state["exp_avg_sq"] / (1 - 0.999 ** (steps + i))).sqrt() + 1e-8
            weight = weight * (1 - rate * 0.1) if name == "adamw" else weight
            weight = weight - rate * 0.9**i * state["exp_avg"] / (1 - 0.9 ** (steps + i)) / corrected
        return weight

    return moved


def request(schedule: str, ranks: int, count: int, optimizer: str, **asked: Any) -> RunConfig:
    config = RunConfig(
        schedule=ScheduleConfig(name=schedule, microbatches=count),
        optimizer=SECTIONS[optimizer],
        weight_prediction=WeightPredictionConfig(**asked),
    )
    config.parallelism.pipeline = ranks
    return config


def made_by(name: str) -> Optimizer:
    return lambda parameters: optimizer_of(SECTIONS[name]).make(SECTIONS[name], list(parameters))


def late(lags: Sequence[int], count: int, backward: float | None) -> Gap:
    """The number of steps that a stage makes from the forward to the micro-batch's own step."""
    return lambda stage, step, number: (step - max(0, (step * count + number - lags[stage]) // count), backward)


@pytest.mark.parametrize(
    ("base", "kind", "optimizer", "ranks", "count"),
    [
        ("ampnet", "momentum", "sgd", 3, 1),
        ("ampnet", "xgrad", "rmsprop", 2, 3),
        ("pipedream", "adam", "adam", 3, 2),
        ("pipedream", "xgrad", "adabelief", 2, 1),
    ],
)
def test_a_prediction_bridges_what_the_stage_is_late(
    base: str, kind: str, optimizer: str, ranks: int, count: int
) -> None:
    schedule, backward = build(base, ranks=ranks, microbatches=count), 0 if base == "ampnet" else None
    lags, batches = [ranks - 1 - stage for stage in range(ranks)], make_batches(2 * count)
    prediction = prediction_of(request(base, ranks, count, optimizer, name=kind), schedule)
    found = train(batches, schedule, prediction=prediction, count=count, optimizer=made_by(optimizer))
    options: dict[str, Any] = {"layers": ranks, "count": count, "optimizer": PLAIN[optimizer]}
    gaps = late(lags, count, backward)
    found.assert_equals(recurrence(batches, lags, **options, gaps=gaps, formula=along(optimizer)))


@pytest.mark.parametrize(("optimizer", "ranks", "count"), [("sgd", 3, 1), ("adamw", 3, 2)])
def test_coasting_makes_steps_without_gradients(optimizer: str, ranks: int, count: int) -> None:
    schedule = build("ampnet", ranks=ranks, microbatches=count)
    lags, batches = [ranks - 1 - stage for stage in range(ranks)], make_batches(2 * count)
    prediction = prediction_of(request("ampnet", ranks, count, optimizer, name="nesterov"), schedule)
    found = train(batches, schedule, prediction=prediction, count=count, optimizer=made_by(optimizer))
    options: dict[str, Any] = {"layers": ranks, "count": count, "optimizer": PLAIN[optimizer]}
    gaps = late(lags, count, 0)
    expected, values = recurrence(batches, lags, **options, gaps=gaps, formula=coasting(optimizer))
    for each in found.losses:
        assert each == pytest.approx(expected, rel=1e-5)  # the closed form of SGD's sum rounds differently
    for key, value in values.items():
        torch.testing.assert_close(found.weights[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("optimizer", "kind", "ranks", "count"), [("sgd", None, 2, 1), ("adam", "adam", 4, 2)])
def test_spectrain_is_its_recurrence(optimizer: str, kind: str | None, ranks: int, count: int) -> None:
    schedule = build("spectrain", ranks=ranks, microbatches=count)
    lags, batches = [ranks - 1 - stage for stage in range(ranks)], make_batches(2 * count)
    prediction = prediction_of(request("spectrain", ranks, count, optimizer, name=kind), schedule)
    found = train(batches, schedule, prediction=prediction, count=count, optimizer=made_by(optimizer))

    def gaps(stage: int, step: int, number: int) -> tuple[float, float | None]:
        return {2: [(1, 0), (0, 0)], 4: [(3, 0), (2, 0), (2, 1), (1, 1)]}[ranks][stage]

    options: dict[str, Any] = {"layers": ranks, "count": count, "optimizer": PLAIN[optimizer]}
    found.assert_equals(recurrence(batches, lags, **options, gaps=gaps, formula=along(optimizer)))
    if count == 1:  # predicted for every micro-batch, but for the last stage, whose two are of equal weights
        assert found.predictions == dict.fromkeys(range(ranks), 2 * STEPS) | {ranks - 1: STEPS}


def test_xpipe_is_its_recurrence_and_predicts_twice_a_step() -> None:
    ranks = count = 4
    schedule = build("xpipe", ranks=ranks, microbatches=count)
    lags, batches = [3, 2, 1, 0], make_batches(2 * count)
    prediction = prediction_of(request("xpipe", ranks, count, "adamw"), schedule)
    found = train(batches, schedule, prediction=prediction, count=count, optimizer=made_by("adamw"))

    def gaps(stage: int, step: int, number: int) -> tuple[float, float | None]:
        return [(2, 1), (1, 1), (1, 1), (1, 1)][stage]

    options: dict[str, Any] = {"layers": ranks, "count": count, "optimizer": PLAIN["adamw"]}
    found.assert_equals(recurrence(batches, lags, **options, gaps=gaps, formula=along("adamw"), bellwether=True))
    assert found.predictions == dict.fromkeys(range(ranks), 2 * STEPS)


def test_a_gap_of_zero_is_the_schedule_without_prediction() -> None:
    schedule, batches = build("pipedream", ranks=2, microbatches=2), make_batches(4)
    plain, found, other = (
        train(batches, schedule, count=2, optimizer=PLAIN["adam"], prediction=prediction)
        for prediction in (
            None,
            prediction_of(request("pipedream", 2, 2, "adam", name="adam", gap=0), schedule),
            prediction_of(request("pipedream", 2, 2, "adam", name="adam"), schedule),
        )
    )
    found.assert_equals((plain.losses[0], plain.weights))
    assert other.losses != plain.losses, "a prediction changes the result"


@pytest.mark.parametrize(
    ("optimizer", "name", "ranks", "gap"),
    [
        ("sgd", "gpipe", 1, None),
        ("rmsprop", "zb_h1", 2, None),
        ("adam", "chimera", 2, 2.5),
        ("adabelief", "1f1b", 2, 0),
    ],
)
def test_xgrad_needs_no_pipeline(optimizer: str, name: str, ranks: int, gap: float | None) -> None:
    """theta_hat = theta - lr q direction; the gradient there; the base optimizer's step of theta."""
    count, batches = 4, make_batches(4)
    order = build(name, ranks=ranks, microbatches=count)
    prediction = prediction_of(request(name, ranks, count, optimizer, name="xgrad", gap=gap), order)
    found = train(batches, order, prediction=prediction, count=count, optimizer=made_by(optimizer), layers=4)
    assert set(found.predictions.values()) == {STEPS}

    def gaps(stage: int, step: int, number: int) -> tuple[float, None]:
        return 1 if gap is None else gap, None

    options: dict[str, Any] = {"layers": 4, "count": count, "optimizer": PLAIN[optimizer]}
    expected, weights = recurrence(batches, [0], **options, gaps=gaps, formula=along(optimizer))
    if name != "chimera":
        found.assert_equals((expected, weights))
        return
    assert found.losses[0] == pytest.approx(expected, rel=1e-5)
    for key, value in weights.items():
        torch.testing.assert_close(found.weights[key], value, rtol=1e-3, atol=1e-5)


def test_with_constant_gradients_momentum_predicts_exactly() -> None:
    """Momentum that has settled moves by the same vector at each step: the weights q steps later are predicted."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.125, momentum=0.5)
    forecast = Forecast(PREDICTIONS["momentum"], optimizer)
    for _ in range(80):
        weight.grad = torch.tensor([0.5, 0.25], dtype=torch.float64)
        optimizer.step()
    ahead = [forecast.predict(weight, q, newest=80, step=80).clone() for q in range(4)]
    for each in ahead:
        assert torch.equal(each, weight)
        optimizer.step()


FITTING = [
    (name, optimizer)
    for name, kind in PREDICTIONS.items()
    for optimizer, section in SECTIONS.items()
    if kind.predict is not None and kind.problem_with(optimizer_of(section), section) is None
]


@pytest.mark.parametrize(("name", "optimizer"), FITTING)
def test_a_prediction_is_nearer_to_later_weights_than_those_of_now(name: str, optimizer: str) -> None:
    """In the bowl of a quadratic, two steps ahead, while the weights are still on their way to the middle."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    made = optimizer_of(SECTIONS[optimizer]).make(SECTIONS[optimizer], [weight])
    forecast = Forecast(PREDICTIONS[name], made)
    for _ in range(5):
        _step_down(made, weight)
    now, ahead = weight.detach().clone(), forecast.predict(weight, 2, newest=5, step=5).detach().clone()
    assert torch.equal(forecast.predict(weight, 0, newest=5, step=5), weight)
    for _ in range(2):
        _step_down(made, weight)
    assert torch.dist(ahead, weight.detach()) < 0.9 * torch.dist(now, weight.detach())


@pytest.mark.parametrize("name", dict(FITTING))
def test_a_prediction_makes_as_many_tensors_as_its_kind_says(name: str) -> None:
    """The most that are alive at once, with any optimizer that fits."""
    peaks = list[float]()
    for optimizer in (each for prediction, each in FITTING if prediction == name):
        weight = nn.Parameter(torch.ones(1000, 3))
        made = optimizer_of(SECTIONS[optimizer]).make(SECTIONS[optimizer], [weight])
        forecast = Forecast(PREDICTIONS[name], made)
        for _ in range(2):
            _step_down(made, weight)
        with LiveTracker() as tracker:
            forecast.predict(weight, 2, newest=2, step=2)
        peaks.append(tracker.peak / weight.nbytes)
    assert max(peaks) == pytest.approx(PREDICTIONS[name].temporaries, abs=0.01)


def _step_down(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
    weight.grad = weight.detach() * torch.tensor([0.1, 0.2, 0.3])
    optimizer.step()


# PipeMare: late forwards without older weights, backwards that are corrected, rates that rise, a synchronous beginning


def pipemare_loop(
    batches: Batches, ranks: int, *, share: float | None = None, annealed: int | None = None
) -> tuple[list[float], Weights]:
    """SGD of 0.05 with one micro-batch a step.

    Args:
        share: what is left after tau steps of a mean of changes; backwards go back by their age times this mean.
        annealed: the steps in which each rate rises from lr / tau to lr, where tau > 1.
    """
    newest = {key: value.detach().clone() for key, value in make_model(ranks).named_parameters()}
    drift = {key: torch.zeros_like(value) for key, value in newest.items()}
    versions, losses, model = [newest], [], make_model(ranks)
    for step, (inputs, targets) in enumerate(batches):
        taus = {key: ranks - 1 - int(key[0]) for key in newest}
        read = {key: versions[max(0, step - tau)][key].clone().requires_grad_() for key, tau in taus.items()}
        loss = functional.mse_loss(functional_call(model, read, (inputs,)), targets) * len(inputs)
        for key, tau in taus.items():
            age = step - max(0, step - tau) if share is not None else 0
            read[key].data.copy_(newest[key] - age * drift[key] if age else newest[key])
        loss.backward()  # type: ignore[no-untyped-call]  # the library's
        updated = {}
        for key, tau in taus.items():
            gradient = read[key].grad
            assert gradient is not None
            rate = 0.05 * (tau ** (min(step / annealed, 1.0) - 1.0) if annealed is not None and tau > 1 else 1.0)
            updated[key] = newest[key].add(gradient / len(inputs), alpha=-rate)
            if share is not None and tau:
                decay = math.pow(share, 1 / tau)
                drift[key].mul_(decay).add_(updated[key] - newest[key], alpha=1 - decay)
        newest = updated
        versions.append(newest)
        losses.append(float(loss.detach().double() / len(inputs)))
    return losses, newest


def test_pipemare_corrects_backwards() -> None:
    schedule, batches = build("pipemare", ranks=4, microbatches=1), make_batches(2)
    config = request("pipemare", 4, 1, "sgd")
    vars(config.schedule).update(discrepancy_correction=0.135)
    prediction, sgd = prediction_of(config, schedule), partial(torch.optim.SGD, lr=0.05)
    found = train(batches, schedule, prediction=prediction, count=1, optimizer=sgd)
    found.assert_equals(pipemare_loop(batches, 4, share=0.135))


def test_pipemare_reschedules_the_rates_of_late_stages() -> None:
    """Each stage's rate is scaled by tau^(k / K - 1), where tau, 3, 2, 1 and 0, is above 1."""
    schedule, batches = build("pipemare", ranks=4, microbatches=1), make_batches(2)
    found = train(batches, schedule, count=1, optimizer=partial(torch.optim.SGD, lr=0.05), rescheduling_steps=6)
    found.assert_equals(pipemare_loop(batches, 4, annealed=6))


def test_the_correction_is_exact_once_changes_are_constant() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.125)
    forecast = Forecast(DRIFT, optimizer)
    versions = []
    for _ in range(200):
        before = weight.detach().clone()
        versions.append(before)
        weight.grad = torch.tensor([0.5, 0.25], dtype=torch.float64)
        optimizer.step()
        forecast.learn(weight, before, 0.5)
    for age in range(4):
        wanted = weight.detach() if not age else versions[-age]
        assert torch.equal(forecast.predict(weight, -age, newest=200, step=200), wanted)


def test_pipemare_with_everything_off_is_ampnet() -> None:
    batches = make_batches(4)
    ampnet, pipemare = (build(name, ranks=4, microbatches=2) for name in ("ampnet", "pipemare"))
    assert prediction_of(request("pipemare", 4, 2, "sgd"), pipemare) is None
    expected, found = (train(batches, each, count=2, optimizer=PLAIN["sgd"]) for each in (ampnet, pipemare))
    found.assert_equals((expected.losses[0], expected.weights))


def test_pipemare_begins_synchronously() -> None:
    """As many steps as the warm-up has are those of one process; then forwards are late again."""
    ranks, count, warmup = 3, 4, 5
    schedule, batches = build("pipemare", ranks=ranks, microbatches=count), make_batches(2 * count)
    options: dict[str, Any] = {"count": count, "optimizer": PLAIN["adam"]}
    flushed = recurrence(batches, [0], layers=ranks, **options)[0]
    losses = train(batches, schedule, **options, warmup_steps=warmup).losses
    assert losses == [losses[0]] * ranks
    assert losses[0][:warmup] == flushed[:warmup]
    assert losses[0][warmup + 1 :] != flushed[warmup + 1 :]
    assert train(batches, schedule, **options, warmup_steps=STEPS).losses[0] == flushed
