"""Parallel pipelines with weights of their own, against elastic averaging written out in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from late_weights import ADAM, MOMENTUM, SGD, Optimizer, Weights, make_batches, make_model, unequal
from layouts import make_engine, part_of
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from runner.api import PipelineStrategy
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.errors import RequestError
from runner.optim.states.elastic import ElasticAverage
from runner.plan.averaging import Averaging
from runner.schedule import build


def reference(
    batches: Sequence[tuple[Tensor, Tensor]], count: int, pipes: int, share: float, optimizer: Optimizer, form: str
) -> tuple[list[float], Weights, list[Weights]]:
    """Losses, averages, and each pipeline's weights: the two forms of averaging as their papers write them."""
    model = make_model()
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    owned = [{name: value.clone().requires_grad_() for name, value in average.items()} for _ in range(pipes)]
    made = [optimizer(list(own.values())) for own in owned]
    losses = []
    for inputs, targets in batches:
        parts = list(zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True))
        total = torch.zeros((), dtype=torch.float64)
        before = [{name: value.detach().clone() for name, value in own.items()} for own in owned]
        for pipe, own in enumerate(owned):
            mine = parts[pipe::pipes]
            for given, wanted in mine:
                loss = functional.mse_loss(functional_call(model, own, (given,)), wanted) * len(given)
                loss.backward()  # type: ignore[no-untyped-call]  # the library's
            for value in own.values():
                assert value.grad is not None
                value.grad.div_(sum(len(given) for given, _ in mine))
        for given, wanted in (parts[at] for at in range(count)):
            pipe = next(pipe for pipe in range(pipes) if any(given is each for each, _ in parts[pipe::pipes]))
            with torch.no_grad():
                loss = functional.mse_loss(functional_call(model, before[pipe], (given,)), wanted) * len(given)
            total += loss.double()
        with torch.no_grad():
            for name, mean in average.items():
                old = [each[name] for each in before]
                if form == "easgd":
                    moves = [share * (each - mean) for each in old]
                    for own, move in zip(owned, moves, strict=True):
                        own[name].sub_(move)
                    moved = torch.zeros_like(mean)
                    for move in moves:
                        moved += move
                    mean += moved
        for each in made:
            each.step()
            each.zero_grad()
        with torch.no_grad():
            for name, mean in average.items():
                if form == "updates":
                    for sign, side in ((-1.0, before), (1.0, owned)):
                        for weights in side:
                            mean.add_(weights[name], alpha=sign / pipes)
                    for own in owned:
                        own[name].mul_(1 - share).add_(mean, alpha=share)
        losses.append(float(total / len(inputs)))
    return losses, average, [{name: value.detach() for name, value in own.items()} for own in owned]


def train(
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    ranks: int,
    count: int,
    averaging: Averaging,
    optimizer: Optimizer,
    data: int = 1,
) -> tuple[list[list[float]], Weights, list[Weights]]:
    """Losses by rank, the averages, and each pipeline's weights."""
    schedule = build("avgpipe", ranks=ranks, microbatches=count, pipes=averaging.pipes)
    models = [make_model() for _ in range(ranks * data)]

    def run(transport: ThreadTransport) -> tuple[list[float], Weights, dict[tuple[int, str], Tensor]]:
        made: list[ElasticAverage] = []

        def build_optimizer(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
            made.append(ElasticAverage(parameters, lambda weights: optimizer(weights), averaging))
            return made[0]

        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport, schedule=schedule, pipeline=ranks, data=data,
            count=count, optimizer=build_optimizer,
        )  # fmt: skip
        losses = []
        for batch in batches:
            losses += [step.loss for step in engine.submit(part_of(batch, transport, ranks, data, schedule))]
        engine.drain()
        averages: Weights = {}
        owned: dict[tuple[int, str], Tensor] = {}
        for stage in engine.stages.values():
            averages |= stage.global_state()
            for name, parameter in stage.named_parameters():
                for pipe, weight in enumerate(made[0].copies[parameter]):
                    owned[pipe, stage.global_name(name)] = weight.detach()
        return losses, averages, owned

    results = run_ranks(ranks * data, run)
    averages = {name: value for _, state, _ in results for name, value in state.items()}
    owned = {key: value for _, _, state in results for key, value in state.items()}
    return (
        [losses for losses, _, _ in results],
        averages,
        [{name: owned[pipe, name] for name in averages} for pipe in range(averaging.pipes)],
    )


@pytest.mark.parametrize(
    ("ranks", "count", "pipes", "form", "optimizer"),
    [(1, 2, 2, "easgd", MOMENTUM), (2, 4, 2, "updates", ADAM), (2, 4, 4, "easgd", SGD)],
)
def test_it_is_elastic_averaging(ranks: int, count: int, pipes: int, form: str, optimizer: Optimizer) -> None:
    """With one rank, ``easgd`` is EASGD. The numbers of pipelines are powers of two, so that bits are equal."""
    batches = make_batches(2 * count)
    averaging = Averaging(pipes, 0.25, form)
    losses, averages, owned = train(batches, ranks=ranks, count=count, averaging=averaging, optimizer=optimizer)
    expected, mean, own = reference(batches, count, pipes, 0.25, optimizer, form)
    assert losses == [pytest.approx(expected, rel=1e-12)] * ranks
    assert unequal(averages, mean) == []
    assert [unequal(found, wanted) for found, wanted in zip(owned, own, strict=True)] == [[]] * pipes


def test_without_elasticity_the_pipelines_are_independent_runs() -> None:
    count, pipes = 4, 2
    batches = make_batches(8)
    _, averages, owned = train(
        batches, ranks=2, count=count, averaging=Averaging(pipes, 0.0, "easgd"), optimizer=MOMENTUM
    )
    start = {name: value.detach() for name, value in make_model().named_parameters()}
    assert unequal(averages, start) == []
    for pipe, found in enumerate(owned):
        alone = [
            (torch.cat(inputs.tensor_split(count)[pipe::pipes]), torch.cat(targets.tensor_split(count)[pipe::pipes]))
            for inputs, targets in batches
        ]
        _, _, (expected,) = reference(alone, count // pipes, 1, 0.0, MOMENTUM, "easgd")
        assert unequal(found, expected) == []


@pytest.mark.parametrize("form", ["easgd", "updates"])
def test_without_a_rate_the_sum_is_conserved(form: str) -> None:
    """The weights are eighths of small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(1)
    average = torch.nn.Parameter(torch.randint(-64, 64, (5, 3), generator=generator) / 8)
    averaging = Averaging(2, 0.25, form)
    optimizer = ElasticAverage([average], lambda weights: torch.optim.SGD(weights, lr=0.0), averaging)
    first, second = optimizer.copies[average]
    move = torch.randint(-64, 64, (5, 3), generator=generator) / 8
    for weight, by in ((first, move), (second, -move)):
        weight.data += by
        weight.grad = torch.ones_like(weight)
    total, apart = average + first + second, (first - second).abs().sum()
    for _ in range(3):
        optimizer.step()
        assert torch.equal(average + first + second, total)
    assert (first - second).abs().sum() < apart


def test_replicas_sum_the_gradients_of_each_pipeline() -> None:
    batches = make_batches(16, steps=5)
    averaging = Averaging(2, 0.25, "easgd")
    losses, averages, _ = train(batches, ranks=2, count=4, averaging=averaging, optimizer=SGD, data=2)
    regrouped = []  # micro-batch m of both replicas belongs to pipeline m modulo 2
    for batch in batches:
        replicas = [[half.tensor_split(4) for half in side.tensor_split(2)] for side in batch]
        inputs, targets = (torch.cat([half[at] for at in range(4) for half in halves]) for halves in replicas)
        regrouped.append((inputs, targets))
    expected, mean, _ = reference(regrouped, 4, 2, 0.25, SGD, "easgd")
    assert losses == [pytest.approx(expected, rel=1e-6)] * 4
    torch.testing.assert_close(averages, mean)


def test_a_script_whose_optimizer_has_one_copy_of_the_weights_is_refused() -> None:
    with pytest.raises(RequestError, match="Its optimizer updates the weights of every pipeline"):
        PipelineStrategy(stages=2, schedule="avgpipe", microbatches=4)
