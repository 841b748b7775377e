"""K-FAC's work as actions in the bubbles: the weights are a plain loop's that takes its inverses at the same steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from layouts import make_engine, part_of, train_in_threads
from test_kfac import SETTINGS, make_batches, make_model
from torch import nn
from torch.nn import functional

from runner.engine.transport_threads import run_ranks
from runner.optim.kfac import KFAC
from runner.schedule import registry
from runner.schedule.simulate import Costs
from runner.schedule.values import Op, Schedule

COUNT, LAYERS = 4, 4
CHOICES = {key: value for key, value in SETTINGS.items() if key != "refresh_every"}


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


def plain_kfac(model: nn.Module, batches, interval: int, inverted: dict[tuple[int, str], int]):
    """No hooks, inverses by their definition: of the batch of an interval's first step, used from a step of it on.

    ``inverted`` tells that step of each linear layer, by its number, and of each side: A of inputs, B of outputs.
    """
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    velocity = {p: torch.zeros_like(p) for p in model.parameters()}
    shown: dict[tuple[int, str], torch.Tensor] = {}
    inverses: dict[tuple[int, str], torch.Tensor] = {}
    losses = []
    for step, (x, y) in enumerate(batches):
        inputs, outputs, value = {}, {}, x
        for layer in (part for child in model for part in (child if isinstance(child, nn.Sequential) else [child])):
            inputs[layer], value = value, layer(value)
            outputs[layer] = value
        loss = functional.mse_loss(value, y)
        losses.append(loss.item())
        model.zero_grad()
        slopes = torch.autograd.grad(len(x) * loss, [outputs[each] for each in linears], retain_graph=True)
        loss.backward()
        for number, (linear, slope) in enumerate(zip(linears, slopes, strict=True)):
            a, g = inputs[linear].detach().flatten(0, -2), slope.flatten(0, -2)
            if linear.bias is not None:
                a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
            for side, rows in (("A", a), ("B", g)):
                if step % interval == 0:
                    shown[number, side] = rows.T @ rows / len(rows)
                if step % interval == inverted[number, side]:
                    factor = shown[number, side]
                    damped = factor + CHOICES["damping"] ** 0.5 * torch.eye(len(factor), dtype=factor.dtype)
                    inverses[number, side] = torch.linalg.inv(damped)
            if (number, "A") not in inverses or (number, "B") not in inverses:
                continue
            parts = [linear.weight.grad, *([] if linear.bias is None else [linear.bias.grad[:, None]])]
            whole = inverses[number, "B"] @ torch.cat(parts, dim=1) @ inverses[number, "A"]
            linear.weight.grad = whole[:, : linear.in_features]
            if linear.bias is not None:
                linear.bias.grad = whole[:, -1]
        with torch.no_grad():
            for p, v in velocity.items():
                v.copy_(CHOICES["momentum"] * v + p.grad + CHOICES["weight_decay"] * p)
                p -= CHOICES["lr"] * v
    return losses


def stage_of_linears(ranks: int) -> list[int]:
    """Of the four layers of ``make_model``, whose six parts are cut evenly: [0, 1, norm, 2, 3, norm]."""
    return {2: [0, 0, 1, 1], 4: [0, 0, 1, 2]}[ranks]


def expected(schedule: Schedule, ranks: int, batches):
    model, inverted = make_model().double(), when_inverted(schedule)
    of_linear = {(n, side): inverted[stage, side] for n, stage in enumerate(stage_of_linears(ranks)) for side in "AB"}
    return model, plain_kfac(model, batches, schedule.windows, of_linear)


def many_batches(samples: int, steps: int, *shape: int):
    batches = make_batches(samples, *shape)
    return [tuple(part.double() for part in batches[step % len(batches)]) for step in range(steps)]


CASES = {
    "1f1b, every second step": (4, "1f1b", Costs(), 2),
    "gpipe, every second step": (4, "gpipe", Costs(), 2),
    "inverses of the same step": (4, "1f1b", Costs(curvature=50.0, inversion=50.0), 1),
    "two ranks": (2, "1f1b", Costs(), 5),
    "gpipe of two ranks": (2, "gpipe", Costs(curvature=0.3, inversion=0.8), 2),
    "work that no bubble has room for": (2, "1f1b", Costs(curvature=0.7, inversion=50.0), 3),
}


@pytest.mark.parametrize(("ranks", "base", "costs", "interval"), CASES.values(), ids=CASES)
def test_equals_plain_kfac_with_the_same_staleness(ranks: int, base: str, costs: Costs, interval: int) -> None:
    """More than two intervals, uneven micro-batches, momentum, weight decay, layers that are left alone."""
    schedule = registry.build("pipefisher", ranks=ranks, microbatches=COUNT, base=base, costs=costs)
    assert schedule.windows == interval
    batches = many_batches(10, 2 * interval + 3)
    options = {"schedule": schedule, "pipeline": ranks, "data": 1, "count": COUNT}
    losses, weights = train_in_threads(
        make_model, functional.mse_loss, batches, optimizer=partial(KFAC, **CHOICES), dtype=torch.float64, **options
    )
    model, plain = expected(schedule, ranks, batches)
    torch.testing.assert_close(losses[-1], plain, rtol=1e-5, atol=0)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)
