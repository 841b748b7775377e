"""K-FAC's work as actions in the bubbles: the weights are a plain loop's that takes its inverses at the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of, train_in_threads
from plain_kfac import plain_kfac
from test_kfac import SETTINGS, make_batches, make_model
from torch import nn
from torch.nn import functional

from runner.checkpoint.state import load_optimizer_state, own_optimizer_state
from runner.engine.actions.curvature import ScheduledCurvature
from runner.engine.engine import Engine
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.optim.kinds.kfac import KFAC
from runner.schedule.catalogue import registry
from runner.schedule.simulation.clock import Costs
from runner.schedule.values import Schedule

COUNT = 4
CHOICES: dict[str, Any] = {key: value for key, value in SETTINGS.items() if key != "refresh_every"}


def when_inverted(schedule: Schedule) -> dict[tuple[int, str], int]:
    """Of each stage and side, the step of the interval in which its inverse is new; from the actions' names alone."""
    found = {}
    for row in schedule.actions:
        for action in map(str, row):
            for side in "AB":
                stage, is_inversion, rest = action.partition(f"INV_{side}")
                if is_inversion:
                    found[int(stage), side] = int(rest.removeprefix("@") or 0)
    return found


def stage_of_linears(ranks: int) -> list[int]:
    """Of the four layers of ``make_model``, whose six parts are cut evenly: [0, 1, norm, 2, 3, norm]."""
    return {2: [0, 0, 1, 1], 4: [0, 0, 1, 2]}[ranks]


def expected(
    schedule: Schedule, ranks: int, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[nn.Sequential, list[float]]:
    model, inverted = make_model().double(), when_inverted(schedule)
    of_linear = {(n, side): inverted[stage, side] for n, stage in enumerate(stage_of_linears(ranks)) for side in "AB"}
    return model, plain_kfac(model, batches, CHOICES, schedule.windows, of_linear)


def many_batches(samples: int, steps: int, *shape: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = make_batches(samples, *shape)
    return [(x.double(), y.double()) for x, y in (batches[step % len(batches)] for step in range(steps))]


CASES = {
    "gpipe, every second step": (4, "gpipe", Costs(), 2),
    "inverses of the same step": (4, "1f1b", Costs(fills={"curvature": 50.0, "inversion": 50.0}), 1),
    "work that no bubble has room for": (2, "1f1b", Costs(fills={"curvature": 0.7, "inversion": 50.0}), 3),
}


@pytest.mark.parametrize(("ranks", "base", "costs", "interval"), CASES.values(), ids=CASES)
def test_equals_plain_kfac_with_the_same_staleness(
    ranks: int, base: str, costs: Costs, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than two intervals, uneven micro-batches, momentum, weight decay, layers that are left alone.

    In float64, losses included, which the engine computes in fp32: inverses that wait amplify rounding.
    """
    monkeypatch.setattr("runner.engine.actions.compute.to_precision", lambda value, dtype: value)
    schedule = registry.build("pipefisher", ranks=ranks, microbatches=COUNT, base=base, costs=costs)
    assert schedule.windows == interval
    batches = many_batches(10, 2 * interval + 3)
    options: dict[str, Any] = {"schedule": schedule, "pipeline": ranks, "data": 1, "count": COUNT}
    losses, weights = train_in_threads(
        make_model, functional.mse_loss, batches, optimizer=partial(KFAC, **CHOICES), dtype=torch.float64, **options
    )
    model, plain = expected(schedule, ranks, batches)
    torch.testing.assert_close(losses[-1], plain, rtol=1e-10, atol=0)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-8, atol=1e-9)


def engines(
    transport: ThreadTransport, schedule: Schedule, models: Sequence[nn.Module]
) -> tuple[Engine, torch.optim.Optimizer]:
    """The engine of a rank, and its optimizer."""
    made: list[KFAC] = []

    def keep(parameters: Sequence[torch.Tensor]) -> KFAC:
        made.append(KFAC(parameters, **CHOICES))
        return made[0]

    layout: dict[str, Any] = {"schedule": schedule, "pipeline": 2, "data": 1, "count": COUNT}
    return make_engine(models[transport.rank], functional.mse_loss, transport, optimizer=keep, **layout), made[0]


def filler_of(engine: Engine) -> ScheduledCurvature:
    assert isinstance(engine.filler, ScheduledCurvature)
    return engine.filler


def submitted(
    engine: Engine, transport: ThreadTransport, schedule: Schedule, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    for batch in batches:
        engine.submit(part_of(batch, transport, 2, 1, schedule))


def test_goes_on_bit_for_bit() -> None:
    """A cut within an interval of five steps: what waits to be summed is summed first, and its sums are saved."""
    cut, schedule = 2, registry.build("pipefisher", ranks=2, microbatches=COUNT)
    batches = many_batches(10, 8)
    whole, broken = ([make_model() for _ in range(2)] for _ in range(2))

    def run(transport: ThreadTransport) -> tuple[bool, bool]:
        engine, _ = engines(transport, schedule, whole)
        submitted(engine, transport, schedule, batches)
        expected = [parameter.clone() for parameter in engine.stages[transport.rank].parameters()]
        first, kfac = engines(transport, schedule, broken)
        submitted(first, transport, schedule, batches[:cut])
        first.drain()
        names = {key for state in kfac.state.values() for key in state}
        saved = own_optimizer_state(kfac, first.saved_parameters)
        weights = {name: value.clone() for name, value in first.stages[transport.rank].state_dict().items()}
        second, other = engines(transport, schedule, broken)
        second.stages[transport.rank].load_state_dict(weights)
        load_optimizer_state(other, second.stages, saved)
        second.start_at(cut)
        submitted(second, transport, schedule, batches[cut:])
        found = second.stages[transport.rank].parameters()
        return all(map(torch.equal, expected, found)), "curvature_output" in names

    results = run_ranks(2, run)
    assert [equal for equal, _ in results] == [True, True]
    assert any(has_sums for _, has_sums in results)


def test_nothing_is_kept_when_the_interval_ends_or_the_stream_is_drained_and_validation_changes_nothing() -> None:
    schedule = registry.build("pipefisher", ranks=2, microbatches=COUNT)
    batches = many_batches(10, 6)

    def run(transport: ThreadTransport, models: list[nn.Module], validates: bool) -> tuple[list[int], list[Any]]:
        engine, _ = engines(transport, schedule, models)
        counts = []
        for batch in batches:
            submitted(engine, transport, schedule, [batch])
            counts.append(len(filler_of(engine).kept))
            if validates:
                engine.evaluate(part_of(batch, transport, 2, 1, schedule))
        engine.drain()
        weights = [parameter.clone() for parameter in engine.stages[transport.rank].parameters()]
        return [*counts, len(filler_of(engine).kept)], weights

    once, again = (
        run_ranks(2, partial(run, models=[make_model() for _ in range(2)], validates=validates))
        for validates in (False, True)
    )
    for (counts, weights), (_, others) in zip(once, again, strict=True):
        assert counts[0] > 0 < counts[5]
        assert counts[4] == counts[6] == 0
        assert all(map(torch.equal, weights, others))


def test_a_skipped_step_leaves_the_inverses_there_are() -> None:
    """The first step of the second interval is not finite, and so are its sums: there is nothing to invert."""
    schedule = registry.build(
        "pipefisher", ranks=2, microbatches=COUNT, costs=Costs(fills={"curvature": 0.3, "inversion": 0.8})
    )
    interval = schedule.windows
    batches = many_batches(10, 2 * interval)
    batches[interval] = (batches[interval][0].log(), batches[interval][1])
    models = [make_model() for _ in range(2)]

    def run(transport: ThreadTransport) -> Any:
        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport, schedule=schedule, pipeline=2, data=1, count=COUNT,
            skip_nonfinite=True, optimizer=partial(KFAC, **CHOICES),
        )  # fmt: skip
        found = [step for batch in batches for step in engine.submit(part_of(batch, transport, 2, 1, schedule))]
        weights = list(engine.stages[transport.rank].parameters())
        return [step.skipped for step in found], all(bool(weight.isfinite().all()) for weight in weights)

    for skipped, finite in run_ranks(2, run):
        assert skipped == [step == interval for step in range(2 * interval)]
        assert finite


def test_without_k_fac_there_is_no_engine() -> None:
    schedule = registry.build("pipefisher", ranks=2, microbatches=COUNT)
    options: dict[str, Any] = {"schedule": schedule, "pipeline": 2, "data": 1, "count": COUNT}
    with pytest.raises(ValueError, match="pipefisher needs K-FAC"):
        train_in_threads(make_model, functional.mse_loss, [], optimizer=partial(torch.optim.SGD, lr=0.1), **options)
