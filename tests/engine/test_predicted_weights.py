"""Predicted weights against a recurrence in plain PyTorch, stage by stage and version by version."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from covering import covering
from layouts import make_engine, part_of
from pytorch_optimizer import AdaBelief as LibrarysAdaBelief
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from runner.config.schema import OptimizerConfig, RunConfig, ScheduleConfig, WeightPredictionConfig
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.weights.predicted import PredictedWeights
from runner.optim.catalogue.registry import optimizer_of
from runner.plan.prediction import Prediction, prediction_of
from runner.schedule import build
from runner.schedule.values import Schedule

WIDTH = 6
STEPS = 12
Batches = Sequence[tuple[Tensor, Tensor]]
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
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


def make_model(layers: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(layers))
    )


def make_batches(samples: int, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [tuple(torch.randn(2, samples, WIDTH, generator=generator)) for _ in range(steps)]


# The formulas, as the papers have them. Each takes the optimizer's name, a weight, its state before the step, the last
# gradient and the gap.


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


def along(name: str, weight: Tensor, state: Mapping[str, Any], gradient: Tensor, steps: int, gap: float) -> Tensor:
    return weight - gap * RATES[name] * direction(name, state, gradient, steps)


def coasting(name: str, weight: Tensor, state: Mapping[str, Any], gradient: Tensor, steps: int, gap: int) -> Tensor:
    """What zero gradients would make of a weight."""
    rate = RATES[name]
    if name == "sgd":
        far: Tensor = weight - rate * (0.9 - 0.9 ** (gap + 1)) / (1 - 0.9) * state["momentum_buffer"]
        return far
    for i in range(1, gap + 1):
        corrected = (state["exp_avg_sq"] / (1 - 0.999 ** (steps + i))).sqrt() + 1e-8
        weight = weight * (1 - rate * 0.1) if name == "adamw" else weight
        moved: Tensor = weight - rate * 0.9**i * state["exp_avg"] / (1 - 0.9 ** (steps + i)) / corrected
        weight = moved
    return weight


RATES = {name: section.lr for name, section in SECTIONS.items()}
Formula = Callable[[str, Tensor, Mapping[str, Any], Tensor, int, Any], Tensor]
Gap = Callable[[int, int, int], tuple[float, float | None]]
"""From stage, window and number of a micro-batch to the gaps of its forward and its backward; None: as its forward."""


def recurrence(
    batches: Batches,
    lags: Sequence[int],
    gaps: Gap,
    *,
    layers: int,
    count: int,
    name: str,
    formula: Formula,
    bellwether: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process that predicts each stage's weights from the state that it had.

    The forward of micro-batch m starts from the version max(0, (m - lag) // count), the backward from m // count.
    """
    model = make_model(layers)
    made = PLAIN[name](list(model.parameters()))
    named = dict(model.named_parameters())
    stage_of = {key: int(key.split(".")[0]) * len(lags) // layers for key in named}

    def kept() -> dict[str, tuple[Tensor, dict[str, Any], Tensor]]:
        return {
            key: (
                value.detach().clone(),
                copy.deepcopy(dict(made.state.get(value, {}))),
                torch.zeros(()) if value.grad is None else value.grad.clone(),
            )
            for key, value in named.items()
        }

    def predicted(key: str, version: int, gap: float) -> Tensor:
        weight, state, gradient = versions[version][key]
        return formula(name, weight, state, gradient, version, gap) if version and gap else weight

    versions, losses = [kept()], []
    for step, (inputs, targets) in enumerate(batches):
        total, weight = torch.zeros((), dtype=torch.float64), 0
        sums: dict[str, Tensor] = {}
        parts = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        for number, (given, wanted) in enumerate(parts):
            leader = 0 if bellwether else number
            read, back = {}, {}
            for key, stage in stage_of.items():
                version = max(0, (step * count + leader - lags[stage]) // count)
                forward, backward = gaps(stage, step, leader)
                read[key] = predicted(key, version, forward).clone().requires_grad_()
                back[key] = read[key].detach() if backward is None else predicted(key, step, backward)
            loss = functional.mse_loss(functional_call(model, read, (given,)), wanted) * len(given)
            for key, value in read.items():
                value.data.copy_(back[key].clone())
            loss.backward()  # type: ignore[no-untyped-call]  # the library's
            for key, value in read.items():
                assert value.grad is not None
                sums[key] = value.grad if key not in sums else sums[key] + value.grad
            total, weight = total + loss.detach().double(), weight + len(given)
        for key, parameter in named.items():
            parameter.grad = sums[key].div_(weight)
        made.step()
        versions.append(kept())
        losses.append(float(total / weight))
    return losses, {key: value for key, (value, _, _) in versions[-1].items()}


def request(schedule: str, ranks: int, count: int, optimizer: str, **asked: Any) -> RunConfig:
    config = RunConfig(
        schedule=ScheduleConfig(name=schedule, microbatches=count),
        optimizer=SECTIONS[optimizer],
        weight_prediction=WeightPredictionConfig(**asked),
    )
    config.parallelism.pipeline = ranks
    return config


def train(
    batches: Batches,
    schedule: Schedule,
    prediction: Prediction | None,
    *,
    count: int,
    optimizer: Optimizer,
    layers: int | None = None,
    **options: Any,
) -> tuple[list[list[float]], dict[str, Tensor], dict[int, int]]:
    """Losses by rank, the weights by global name, and how often each stage has predicted its weights."""
    ranks = schedule.ranks
    models = [make_model(layers or schedule.stages) for _ in range(ranks)]

    def run(transport: ThreadTransport) -> tuple[list[float], dict[str, Tensor], dict[int, int]]:
        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport,
            schedule=schedule, pipeline=ranks, data=1, count=count, optimizer=optimizer,
            prediction=prediction, **options,
        )  # fmt: skip
        found = []
        for batch in batches:
            found += engine.submit(part_of(batch, transport, ranks, 1, schedule))
        found += engine.drain()
        weights = {name: value for stage in engine.stages.values() for name, value in stage.global_state().items()}
        stores = {stage: each for stage, each in engine.stores.items() if isinstance(each, PredictedWeights)}
        return [step.loss for step in found], weights, {stage: each.predictions for stage, each in stores.items()}

    results = run_ranks(ranks, run)
    weights = {name: value for _, state, _ in results for name, value in state.items()}
    return [each for each, _, _ in results], weights, {k: v for _, _, made in results for k, v in made.items()}


def made_by(name: str) -> Optimizer:
    return lambda parameters: optimizer_of(SECTIONS[name]).make(SECTIONS[name], list(parameters))


def require_equal(
    found: tuple[list[list[float]], dict[str, Tensor], Any], expected: tuple[list[float], dict[str, Tensor]]
) -> None:
    losses, weights, _ = found
    assert losses == [expected[0]] * len(losses)
    assert [key for key, value in expected[1].items() if not torch.equal(weights[key], value)] == []


def late(lags: Sequence[int], count: int, backward: float | None) -> Gap:
    """The number of steps that a stage makes from the forward to the micro-batch's own step."""
    return lambda stage, step, number: (step - max(0, (step * count + number - lags[stage]) // count), backward)


SIZES = [(2, 1), (4, 1), (4, 2), (3, 5)]


@pytest.mark.parametrize(("base", "backward"), [("ampnet", 0), ("pipedream", None)])
@pytest.mark.parametrize(
    ("kind", "optimizer"), [("momentum", "sgd"), ("adam", "adam"), ("xgrad", "adabelief"), ("xgrad", "rmsprop")]
)
@pytest.mark.parametrize(("ranks", "count"), SIZES)
def test_a_prediction_bridges_what_the_stage_is_late(
    ranks: int, count: int, kind: str, optimizer: str, base: str, backward: float | None
) -> None:
    schedule = build(base, ranks=ranks, microbatches=count)
    lags, batches = [ranks - 1 - stage for stage in range(ranks)], make_batches(2 * count)
    prediction = prediction_of(request(base, ranks, count, optimizer, name=kind), schedule)
    found = train(batches, schedule, prediction, count=count, optimizer=made_by(optimizer))
    gaps = late(lags, count, backward)
    options: dict[str, Any] = {"layers": ranks, "count": count, "name": optimizer}
    require_equal(found, recurrence(batches, lags, gaps, **options, formula=along))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 1), (4, 2)])
def test_coasting_makes_steps_without_gradients(ranks: int, count: int, optimizer: str) -> None:
    schedule = build("ampnet", ranks=ranks, microbatches=count)
    lags, batches = [ranks - 1 - stage for stage in range(ranks)], make_batches(2 * count)
    prediction = prediction_of(request("ampnet", ranks, count, optimizer, name="nesterov"), schedule)
    losses, weights, _ = train(batches, schedule, prediction, count=count, optimizer=made_by(optimizer))
    options: dict[str, Any] = {"layers": ranks, "count": count, "name": optimizer}
    expected, values = recurrence(batches, lags, late(lags, count, 0), **options, formula=coasting)
    for each in losses:
        assert each == pytest.approx(expected, rel=1e-5)  # the closed form of SGD's sum rounds differently
    for key, value in values.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("optimizer", "kind"), [("sgd", None), ("adam", "adam")])
@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 1), (4, 2)])
def test_spectrain_is_its_recurrence(ranks: int, count: int, optimizer: str, kind: str | None) -> None:
    schedule = build("spectrain", ranks=ranks, microbatches=count)
    lags, batches = [ranks - 1 - stage for stage in range(ranks)], make_batches(2 * count)
    prediction = prediction_of(request("spectrain", ranks, count, optimizer, name=kind), schedule)
    found = train(batches, schedule, prediction, count=count, optimizer=made_by(optimizer))

    def gaps(stage: int, step: int, number: int) -> tuple[float, float | None]:
        return {2: [(1, 0), (0, 0)], 4: [(3, 0), (2, 0), (2, 1), (1, 1)]}[ranks][stage]

    options: dict[str, Any] = {"layers": ranks, "count": count, "name": optimizer}
    require_equal(found, recurrence(batches, lags, gaps, **options, formula=along))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_xpipe_is_its_recurrence_and_predicts_twice_a_step(optimizer: str) -> None:
    ranks = count = 4
    schedule = build("xpipe", ranks=ranks, microbatches=count)
    lags, batches = [3, 2, 1, 0], make_batches(2 * count)
    prediction = prediction_of(request("xpipe", ranks, count, optimizer), schedule)
    found = train(batches, schedule, prediction, count=count, optimizer=made_by(optimizer))

    def gaps(stage: int, step: int, number: int) -> tuple[float, float | None]:
        return [(2, 1), (1, 1), (1, 1), (1, 1)][stage]

    options: dict[str, Any] = {"layers": ranks, "count": count, "name": optimizer, "bellwether": True}
    require_equal(found, recurrence(batches, lags, gaps, **options, formula=along))
    assert found[2] == dict.fromkeys(range(ranks), 2 * STEPS)


def test_spectrain_predicts_for_every_micro_batch() -> None:
    schedule = build("spectrain", ranks=4, microbatches=1)
    prediction = prediction_of(request("spectrain", 4, 1, "sgd"), schedule)
    found = train(make_batches(2), schedule, prediction, count=1, optimizer=made_by("sgd"))
    assert found[2] == dict.fromkeys(range(4), 2 * STEPS) | {3: STEPS}  # the last stage's two are of equal weights


@pytest.mark.parametrize(("base", "kind", "optimizer"), [("ampnet", "momentum", "sgd"), ("pipedream", "adam", "adam")])
@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 2)])
def test_a_gap_of_zero_is_the_schedule_without_prediction(
    base: str, kind: str, optimizer: str, ranks: int, count: int
) -> None:
    schedule, batches = build(base, ranks=ranks, microbatches=count), make_batches(2 * count)
    prediction = prediction_of(request(base, ranks, count, optimizer, name=kind, gap=0), schedule)
    assert prediction is not None
    options: dict[str, Any] = {"count": count, "optimizer": PLAIN[optimizer]}
    plain = train(batches, schedule, None, **options)
    found = train(batches, schedule, prediction, **options)
    require_equal(found, (plain[0][0], plain[1]))
    other = prediction_of(request(base, ranks, count, optimizer, name=kind), schedule)
    assert train(batches, schedule, other, **options)[0] != plain[0], "a prediction changes the result"


RANKS = {"gpipe": 1, "1f1b": 2, "zb_h1": 2, "chimera": 2}


@pytest.mark.parametrize(
    ("optimizer", "schedule", "gap"),
    covering({"optimizer": sorted(SECTIONS), "schedule": [*RANKS], "gap": [None, 0, 2.5]}, strength=2, seed=3),
)
def test_xgrad_needs_no_pipeline(optimizer: str, schedule: str, gap: float | None) -> None:
    """theta_hat = theta - lr q direction; the gradient there; the base optimizer's step of theta."""
    count, ranks, batches = 4, RANKS[schedule], make_batches(4)
    order = build(schedule, ranks=ranks, microbatches=count)
    prediction = prediction_of(request(schedule, ranks, count, optimizer, name="xgrad", gap=gap), order)
    losses, weights, made = train(batches, order, prediction, count=count, optimizer=made_by(optimizer), layers=4)
    assert set(made.values()) == {STEPS}
    model = make_model(4)
    theta = list(model.parameters())
    base = PLAIN[optimizer](theta)
    expected = []
    for step, (inputs, targets) in enumerate(batches):
        kept = [each.detach().clone() for each in theta]
        if step:
            for each in theta:
                gradient = torch.zeros(()) if each.grad is None else each.grad
                moved = direction(optimizer, base.state[each], gradient, step)
                each.data.sub_((1 if gap is None else gap) * RATES[optimizer] * moved)
        base.zero_grad()
        total = 0.0
        for given, wanted in zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True):
            loss = functional.mse_loss(model(given), wanted) * len(given)
            loss.backward()  # type: ignore[no-untyped-call]  # the library's
            total += loss.item()
        for each, own in zip(theta, kept, strict=True):
            each.data.copy_(own)
            assert each.grad is not None
            each.grad.div_(len(inputs))
        base.step()
        expected.append(total / len(inputs))
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    exact = schedule != "chimera"
    for key, value in model.state_dict().items():
        if exact:
            assert torch.equal(weights[key], value), key
        else:
            torch.testing.assert_close(weights[key], value, rtol=1e-3, atol=1e-5)


def test_with_constant_gradients_momentum_predicts_exactly() -> None:
    """Momentum that has settled moves by the same vector at each step: the weights q steps later are predicted."""
    from runner.optim.catalogue.registry import PREDICTIONS
    from runner.optim.forecast import Forecast

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


def pipemare_loop(batches: Batches, ranks: int, *, share: float, rate: float) -> tuple[list[float], dict[str, Tensor]]:
    """One micro-batch a step: backwards go back by (their age) x (the mean of changes), which decays by C^(1 / tau)."""
    model = make_model(ranks)
    named = dict(model.named_parameters())
    stage_of = {key: int(key.split(".")[0]) for key in named}
    made = torch.optim.SGD(list(named.values()), lr=rate)
    drift = {key: torch.zeros_like(value) for key, value in named.items()}
    versions = [{key: value.detach().clone() for key, value in named.items()}]
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        read = {}
        for key, stage in stage_of.items():
            version = max(0, step - (ranks - 1 - stage))
            read[key] = versions[version][key].clone().requires_grad_()
        loss = functional.mse_loss(functional_call(model, read, (inputs,)), targets) * len(inputs)
        for key, stage in stage_of.items():
            age = step - max(0, step - (ranks - 1 - stage))
            read[key].data.copy_(named[key].detach() - age * drift[key] if step and age else named[key].detach())
        loss.backward()  # type: ignore[no-untyped-call]  # the library's
        before = {key: value.detach().clone() for key, value in named.items()}
        for key, value in named.items():
            gradient = read[key].grad
            assert gradient is not None
            value.grad = gradient / len(inputs)
        made.step()
        for key, value in named.items():
            tau = ranks - 1 - stage_of[key]
            if tau:
                decay = math.pow(share, 1 / tau)
                drift[key].mul_(decay).add_(value.detach() - before[key], alpha=1 - decay)
        versions.append({key: value.detach().clone() for key, value in named.items()})
        losses.append(float(loss.detach().double() / len(inputs)))
    return losses, versions[-1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_pipemare_corrects_backwards(ranks: int) -> None:
    schedule, batches = build("pipemare", ranks=ranks, microbatches=1), make_batches(2)
    config = request("pipemare", ranks, 1, "sgd")
    config.schedule.discrepancy_correction = 0.135
    found = train(
        batches, schedule, prediction_of(config, schedule), count=1, optimizer=partial(torch.optim.SGD, lr=0.05)
    )
    require_equal(found, pipemare_loop(batches, ranks, share=0.135, rate=0.05))


def test_the_correction_is_exact_once_changes_are_constant() -> None:
    from runner.optim.catalogue.drift import DRIFT
    from runner.optim.forecast import Forecast

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


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 2)])
def test_pipemare_with_everything_off_is_ampnet(ranks: int, count: int) -> None:
    batches = make_batches(2 * count)
    results = []
    for name in ("ampnet", "pipemare"):
        schedule = build(name, ranks=ranks, microbatches=count)
        prediction = prediction_of(request(name, ranks, count, "sgd"), schedule)
        assert prediction is None
        results.append(train(batches, schedule, prediction, count=count, optimizer=PLAIN["sgd"]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][key], value) for key, value in results[1][1].items())


def test_pipemare_reschedules_the_rates_of_late_stages() -> None:
    """The oracle scales each stage's rate by tau^(k / K - 1), where tau, 3, 2, 1 and 0, is above 1."""
    ranks, annealed = 4, 6
    schedule, batches = build("pipemare", ranks=ranks, microbatches=1), make_batches(2)
    options: dict[str, Any] = {"count": 1, "optimizer": partial(torch.optim.SGD, lr=0.05)}
    losses, weights, _ = train(batches, schedule, None, **options, rescheduling_steps=annealed)
    model = make_model(ranks)
    versions = [copy.deepcopy(model.state_dict())]
    expected = []
    for step, (inputs, targets) in enumerate(batches):
        read, newest = {}, versions[-1]
        for key in newest:
            version = max(0, step - (ranks - 1 - int(key[0])))
            read[key] = versions[version][key].clone().requires_grad_()
        loss = functional.mse_loss(functional_call(model, read, (inputs,)), targets) * len(inputs)
        for key, value in newest.items():
            read[key].data.copy_(value)
        loss.backward()  # type: ignore[no-untyped-call]  # the library's
        updated = {}
        for key, value in newest.items():
            tau, gradient = ranks - 1 - int(key[0]), read[key].grad
            assert gradient is not None
            rate = 0.05 * (tau ** (min(step / annealed, 1.0) - 1.0) if tau > 1 else 1.0)
            updated[key] = value.add(gradient / len(inputs), alpha=-rate)
        versions.append(updated)
        expected.append(float(loss.detach().double() / len(inputs)))
    assert losses == [expected] * ranks
    assert all(torch.equal(weights[key], value) for key, value in versions[-1].items())


def test_pipemare_begins_synchronously() -> None:
    """As many steps as the warm-up has are those of one process; then forwards are late again."""
    ranks, count, warmup = 3, 4, 5
    schedule, batches = build("pipemare", ranks=ranks, microbatches=count), make_batches(2 * count)
    options: dict[str, Any] = {"count": count, "optimizer": PLAIN["adam"]}
    flushed = train(batches, build("1f1b", ranks=ranks, microbatches=count), None, **options)[0][0]
    losses = train(batches, schedule, None, **options, warmup_steps=warmup)[0]
    assert losses == [losses[0]] * ranks
    assert losses[0][:warmup] == flushed[:warmup]
    assert losses[0][warmup + 1 :] != flushed[warmup + 1 :]
    whole = train(batches, schedule, None, **options, warmup_steps=STEPS)[0][0]
    assert whole == flushed
