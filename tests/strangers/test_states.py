"""Models that remember train as a plain loop over the same micro-batches does, whatever was tried before."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of
from stateful import IN_BUFFERS, KINDS, ONE_PROCESS, WRITE_WEIGHTS, Streams, forget, model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from runner.config.compose.resolve import resolve
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.errors import RequestError
from runner.memory.apply.recompute import Recompute
from runner.model.kept_state import KeptState
from runner.model.layers import Part, StageModule
from runner.plan.make import make_plan
from runner.profiling.model import profile_model
from runner.training.measure.prediction import _rehearsed

STEPS = 3
SGD = partial(torch.optim.SGD, lr=0.1)


def batches(seed: int, size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(STEPS)
    ]


def plain(kinds: list[str], seed: int, count: int) -> tuple[list[float], dict[str, Tensor]]:
    forget()
    made = model(kinds, seed)
    optimizer = SGD(made.parameters())
    losses = []
    for inputs, targets in batches(seed, 8):
        optimizer.zero_grad()
        total = 0.0
        for some, wanted in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = cross_entropy(made(some), wanted) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, made.state_dict()


def checkpointed(stage: StageModule, _: int) -> None:
    stage.wrap([Part(stage.first_layer, stage.last_layer, around=Recompute(list(stage.layers)))])


def trained(
    kinds: list[str], seed: int, count: int, pipeline: int, *, again: bool = False, schedule: str = "1f1b"
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state after a rehearsal and a validation that must leave nothing behind."""
    forget()
    models = [model(kinds, seed) for _ in range(pipeline)]

    def run(transport: ThreadTransport) -> tuple[list[float], dict[str, Tensor]]:
        engine = make_engine(
            models[transport.rank], cross_entropy, transport, schedule=schedule, pipeline=pipeline, data=1, count=count,
            optimizer=SGD, prepare=checkpointed if again else None,
        )  # fmt: skip
        parts = [part_of(batch, transport, pipeline, 1) for batch in batches(seed, 8)]
        with engine.unchanged():
            engine.validate(parts[0])
        engine.rehearse(parts[0], 2)
        losses = [step.loss for part in parts for step in engine.submit(part)]
        return losses, {k: v for stage in engine.stages.values() for k, v in stage.global_state().items()}

    results = run_ranks(pipeline, run)
    return results[0][0], {name: value for _, state in results for name, value in state.items()}


def require_equal(kinds: list[str], seed: int, count: int, pipeline: int, **options: Any) -> None:
    (losses, state), (wanted, expected) = trained(kinds, seed, count, pipeline, **options), plain(kinds, seed, count)
    assert losses == pytest.approx(wanted, rel=2e-6)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_as_plainly_after_a_rehearsal(kind: str) -> None:
    require_equal([kind, kind], 3, 4, 1)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - ONE_PROCESS))
def test_in_two_stages(kind: str) -> None:
    require_equal([kind, kind], 4, 1 if kind in WRITE_WEIGHTS else 2, 2)


@pytest.mark.parametrize("kind", sorted(IN_BUFFERS))
def test_what_is_in_buffers_is_changed_once_if_layers_run_again(kind: str) -> None:
    require_equal([kind], 5, 2, 1, again=True)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_large_to_be_copied_is_copied_before_it_is_changed(kind: str) -> None:
    forget()
    made = model([kind], 1)
    inputs = torch.randn(8, 4)
    kept = KeptState([("model", made)], most_bytes=WRITTEN_ARRAYS)
    assert kept.copies_late
    before = {name: value.clone() for name, value in made.state_dict().items()}
    with kept.first_run():
        first = made(inputs).detach()
    made(inputs)
    assert kept.put_back() == []
    assert made.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert torch.equal(made(inputs).detach(), first)


WRITTEN_ARRAYS = 16
"""Enough for the array of :class:`stateful.Plain`, and for no weight."""


def test_ranks_rehearse_as_often_if_one_alone_has_too_much_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.engine.engine.KeptState", partial(KeptState, most_bytes=1600))
    made = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 3))
    batch = batches(0, 8)[0]

    def run(transport: ThreadTransport) -> tuple[bool, int]:
        engine = make_engine(
            made, cross_entropy, transport, schedule="1f1b", pipeline=2, data=1, count=2, optimizer=SGD
        )
        with engine.unchanged() as kept:
            late = kept.copies_late
        strategy: Any = _Together(transport)
        return late, len(_rehearsed(strategy, engine, part_of(batch, transport, 2, 1)).steps)

    (first, windows), (second, others) = run_ranks(2, run)
    assert (first, second) == (True, False)
    assert windows == others > 0


class _Together:
    """What a rehearsal asks of a strategy.

    Args:
        transport: between two ranks.
    """

    def __init__(self, transport: ThreadTransport) -> None:
        self._transport = transport

    def all_gather_objects(self, value: float) -> list[float]:
        return [float(each) for each in self._transport.all_gather(torch.tensor([float(value)]), (0, 1))]


def test_weights_that_a_later_run_changes_are_told() -> None:
    class Late(nn.Linear):
        calls = 0

        def forward(self, value: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                self.weight.data.mul_(0.5)
                self.bias.detach_().mul_(2)
            return super().forward(value)

    made = Late(4, 4)
    kept = KeptState([("late", made)], most_bytes=0)
    with kept.first_run():
        made(torch.randn(2, 4))
    made(torch.randn(2, 4))
    assert kept.put_back() == ["late._parameters.bias"]


def test_a_generator_that_cannot_be_put_back_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "runner")
    made = nn.Sequential(nn.Linear(4, 6), Streams(), nn.Linear(6, 3))
    batch = batches(0, 8)[0]

    def run(transport: ThreadTransport) -> None:
        engine = make_engine(
            made, cross_entropy, transport, schedule="1f1b", pipeline=1, data=1, count=2, optimizer=SGD
        )
        engine.rehearse(part_of(batch, transport, 1, 1), 1)

    run_ranks(1, run)
    said = "the runs before the first step have changed what cannot be put back: 1.numbers"
    assert [record.getMessage() for record in caplog.records] == [said]


def planned(kind: str, *words: str) -> list[str]:
    """The paths of the problems of a plan of a model of this kind."""
    named = [
        "model.target=stateful:model",
        f"model.kwargs={{kinds: [{kind}], seed: 1}}",
        "data.target=test_states:samples",
    ]
    asked = resolve([*named, "data.batch_size=8", "loss=cross_entropy", "hardware=a100_80gb", "device=cpu", *words])
    try:
        make_plan(asked, profile_model(asked))
    except RequestError as error:
        return [problem.path for problem in error.problems]
    return []


def samples() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(*batches(0, 8)[0])


@pytest.mark.costly
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"Switches"}))
def test_layers_that_would_change_their_state_twice_are_refused(kind: str) -> None:
    refused = [] if kind in {*IN_BUFFERS, "Replaces"} else ["activation_checkpoint.name"]
    assert planned(kind, "activation_checkpoint=full") == refused
    again = ("parallelism.pipeline=2", "schedule.microbatches=2")
    assert planned(kind, *again) == (["schedule.microbatches"] if kind in {"Momentum", "Clips"} else [])
    assert planned(kind, "schedule.microbatches=2") == []


class Transient(nn.Module):
    """A running mean that its author keeps out of state dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        self.get_buffer("mean").lerp_(value.detach().mean(0), 0.1)
        made: Tensor = self.linear(value - self.get_buffer("mean").clone())
        return made


def transient() -> nn.Sequential:
    return nn.Sequential(Transient())


@pytest.mark.parametrize(("kind", "name"), [("", "0.mean"), ("Counts", "1.calls"), ("Spectral", None)])
def test_what_no_checkpoint_holds_is_told(kind: str, name: str | None) -> None:
    model = ["model.target=stateful:model", f"model.kwargs={{kinds: [{kind}], seed: 1}}"]
    words = [*(model if kind else ["model.target=test_states:transient"]), "data.target=test_states:samples"]
    asked = resolve([*words, "data.batch_size=8", "loss=cross_entropy", "hardware=a100_80gb", "device=cpu"])
    cautions = make_plan(asked, profile_model(asked)).cautions
    told = [each.line.partition(",")[0] for each in cautions if each.about == "checkpoints"]
    assert told == ([] if name is None else [f"a forward changes {name}"])


def test_layers_that_remember_nothing_are_not_refused() -> None:
    words = ("model=gpt", "hardware=a100_80gb", "device=cpu", "activation_checkpoint=full")
    assert profile_model(resolve([*words])).changed_states == ()
