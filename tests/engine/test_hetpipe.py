"""Workers that exchange the changes of waves of steps, against their recurrence in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from late_weights import ADAM, MOMENTUM, SGD, Batches, Optimizer, Weights, make_batches, make_model, unequal
from layouts import make_engine, part_of
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.schedule import build

STEPS = 9


class Worker:
    """One worker: its own weights by step, its optimizer, and the waves whose sums it has not taken in."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.model = make_model()
        self.optimizer = optimizer(list(self.model.parameters()))
        self.versions = [self.weights()]
        self.start = self.server = self.weights()
        self.waves: list[Weights] = []

    def weights(self) -> Weights:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def gradients(self, step: int, batch: tuple[Tensor, Tensor], count: int, late: int, samples: int) -> float:
        """Gradients at the weights of ``late`` steps ago, divided by the samples of all workers; the loss's sum."""
        read = {name: value.clone().requires_grad_() for name, value in self.versions[max(0, step - late)].items()}
        total = 0.0
        for given, wanted in zip(*(part.tensor_split(count) for part in batch), strict=True):
            loss = functional.mse_loss(functional_call(self.model, read, (given,)), wanted) * len(given)
            loss.backward()  # type: ignore[no-untyped-call]  # the library's
            total += float(loss.detach().double())
        for name, parameter in self.model.named_parameters():
            gradient = read[name].grad
            assert gradient is not None
            parameter.grad = gradient.div_(samples)
        return total


def exchange(workers: Sequence[Worker], distance: int) -> None:
    for worker in workers:
        now = worker.weights()
        worker.waves.append({name: value - worker.start[name] for name, value in now.items()})
        worker.start = now
    if len(workers[0].waves) <= distance:
        return
    oldest = [worker.waves.pop(0) for worker in workers]
    for worker in workers:
        worker.server = {name: value + sum(each[name] for each in oldest) for name, value in worker.server.items()}
        worker.start = {
            name: sum((wave[name] for wave in worker.waves), value) for name, value in worker.server.items()
        }
        with torch.no_grad():
            for name, parameter in worker.model.named_parameters():
                parameter.copy_(worker.start[name])


def recurrence(
    batches: Batches, *, workers: int, count: int, wave: int, distance: int, late: int, optimizer: Optimizer
) -> tuple[list[float], list[Weights]]:
    """Losses, and each worker's weights before the last exchange of all that is under way."""
    all_workers = [Worker(optimizer) for _ in range(workers)]
    losses = []
    for step, batch in enumerate(batches):
        samples = len(batch[0])
        shares = list(zip(*(side.tensor_split(workers) for side in batch), strict=True))
        sums = [
            worker.gradients(step, share, count, late, samples)
            for worker, share in zip(all_workers, shares, strict=True)
        ]
        losses.append(sum(sums) / samples)
        for worker in all_workers:
            worker.optimizer.step()
        if (step + 1) % wave == 0 and workers > 1:
            exchange(all_workers, distance)
        for worker in all_workers:
            worker.versions.append(worker.weights())
    return losses, [worker.weights() for worker in all_workers]


def train(
    batches: Batches, *, ranks: int, workers: int, count: int, wave: int, distance: int, optimizer: Optimizer
) -> tuple[list[float], list[Weights], list[Weights]]:
    """Losses, each worker's weights after the last step, and after all is exchanged."""
    schedule = build("hetpipe", ranks=ranks, microbatches=count, wave=wave, distance=distance)
    models = [make_model() for _ in range(ranks * workers)]

    def run(transport: ThreadTransport) -> tuple[list[float], Weights, Weights]:
        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport, schedule=schedule, pipeline=ranks, data=workers,
            count=count, optimizer=optimizer,
        )  # fmt: skip
        found = []
        for batch in batches:
            found += engine.submit(part_of(batch, transport, ranks, workers, schedule))
        if engine.overlap:
            engine._runner.run(engine._stream.drain(len(batches), 0))
        stages = engine.stages.values()
        before = {name: value.clone() for stage in stages for name, value in stage.global_state().items()}
        engine._runner.since = len(batches)
        found += engine.drain()
        after = {name: value.clone() for stage in stages for name, value in stage.global_state().items()}
        return [step.loss for step in found], before, after

    results = run_ranks(ranks * workers, run)

    def of_worker(number: int, which: int) -> Weights:
        return {name: value for rank in range(ranks) for name, value in results[rank * workers + number][which].items()}  # type: ignore[union-attr]

    assert all(losses == results[0][0] for losses, _, _ in results)
    before, after = ([of_worker(number, which) for number in range(workers)] for which in (1, 2))
    return results[0][0], before, after


@pytest.mark.parametrize(
    ("ranks", "workers", "count", "wave", "distance", "optimizer"),
    [
        (1, 1, 2, 1, 0, MOMENTUM), (1, 2, 1, 2, 1, ADAM), (2, 2, 1, 2, 0, SGD), (2, 2, 2, 2, 2, MOMENTUM),
        (4, 1, 1, 4, 0, ADAM),
    ],
)  # fmt: skip
def test_it_is_its_recurrence(
    ranks: int, workers: int, count: int, wave: int, distance: int, optimizer: Optimizer
) -> None:
    batches = make_batches(4 * workers, STEPS)
    sizes: dict[str, Any] = {"workers": workers, "count": count, "wave": wave, "distance": distance}
    found, weights, after = train(batches, ranks=ranks, **sizes, optimizer=optimizer)
    late = wave - 1 if ranks > 1 else 0
    losses, expected = recurrence(batches, **sizes, late=late, optimizer=optimizer)
    assert found == pytest.approx(losses, rel=1e-12)
    assert [unequal(own, wanted) for own, wanted in zip(weights, expected, strict=True)] == [[]] * workers
    assert [unequal(each, after[0]) for each in after] == [[]] * workers
    schedule = build("hetpipe", ranks=ranks, microbatches=count, wave=wave)
    assert [schedule.older_versions(stage) for stage in range(ranks)] == [late] * ranks


def test_a_synchronous_parameter_server_is_data_parallelism() -> None:
    """To rounding, as the optimizer is linear in the gradients."""
    batches = make_batches(8, STEPS)
    _, _, (found, _) = train(batches, ranks=1, workers=2, count=1, wave=1, distance=0, optimizer=MOMENTUM)
    _, (expected,) = recurrence(batches, workers=1, count=2, wave=1, distance=0, late=0, optimizer=MOMENTUM)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
