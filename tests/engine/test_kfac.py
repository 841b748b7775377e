"""K-FAC in pipelines: every schedule's weights are a plain loop's, which knows nothing of the runner."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from layouts import train_in_threads
from plain_kfac import plain_kfac
from small_models import token_loss
from test_ties import make_batches as token_batches
from test_ties import make_tied
from torch import nn
from torch.nn import functional

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.model.load import model_layers
from runner.optim.kinds.kfac import KFAC, preconditioned_layers
from runner.schedule.catalogue import registry
from runner.schedule.values import Schedule

SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "damping": 1e-2, "refresh_every": 3}
STEPS, COUNT = 8, 4


def make_model() -> nn.Sequential:
    """Four layers that are preconditioned, one of them without bias, and two that are not."""
    torch.manual_seed(3)
    linears = [nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 5), nn.Linear(5, 3)]
    layers = [nn.Sequential(layer, nn.Tanh()) for layer in linears]
    return nn.Sequential(*layers[:2], nn.LayerNorm(8), *layers[2:], nn.LayerNorm(3))


def make_batches(samples: int, *shape: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    sizes = (samples, *shape)
    return [
        (torch.randn(*sizes, 6, generator=generator), torch.randn(*sizes, 3, generator=generator)) for _ in range(STEPS)
    ]


def train_kfac(
    make: Callable[..., Any],
    loss: Callable[..., Any],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    schedule: Schedule | str,
    pipeline: int,
    settings: dict[str, Any] = SETTINGS,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the last rank, and the weights by global name."""
    options: dict[str, Any] = {"schedule": schedule, "pipeline": pipeline, "data": 1, "count": COUNT}
    losses, weights = train_in_threads(make, loss, batches, optimizer=partial(KFAC, **settings), **options)
    return losses[-1], weights


LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("gpipe", 1, {}),
    ("interleaved_1f1b", 2, {"chunks": 2}),
    ("varuna", 3, {}),
]


@pytest.mark.parametrize(("name", "ranks", "more"), LAYOUTS, ids=lambda value: str(value))
def test_equals_plain_kfac(name: str, ranks: int, more: dict[str, Any]) -> None:
    """Uneven micro-batches; three steps on one step's factors; weight decay, momentum, layers that are left alone."""
    schedule = registry.build(name, ranks=ranks, microbatches=COUNT, **more)
    losses, weights = train_kfac(make_model, functional.mse_loss, make_batches(10), schedule, ranks)
    model = make_model()
    torch.testing.assert_close(
        losses, plain_kfac(model, make_batches(10), SETTINGS, SETTINGS["refresh_every"]), rtol=1e-5, atol=0
    )
    for key, value in model.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)


def test_rows_are_tokens_where_inputs_are_sequences() -> None:
    """With more damping: without, the inverses multiply the difference of two roundings by up to 100 in every step."""
    damped = SETTINGS | {"damping": 0.1}
    losses, weights = train_kfac(make_model, functional.mse_loss, make_batches(8, 5), "1f1b", 2, damped)
    model = make_model()
    expected = plain_kfac(model, make_batches(8, 5), damped, damped["refresh_every"])
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)


def test_an_inverse_lies_in_memory_as_one_from_a_checkpoint() -> None:
    """Otherwise the products of a resumed run are rounded in another way."""
    factor = KFAC([weight := nn.Parameter(torch.randn(3, 4))], **SETTINGS).track(weight, None).inputs
    factor.add(torch.randn(8, 4))
    assert factor.inverse(0.1).is_contiguous()


def test_tied_layers_have_plain_gradient_descent_in_every_cut() -> None:
    one, three = (train_kfac(make_tied, token_loss, token_batches(8), "gpipe", pipeline) for pipeline in (1, 3))
    torch.testing.assert_close(one[0], three[0], rtol=1e-5, atol=0)
    for key, value in three[1].items():
        torch.testing.assert_close(one[1][key], value, rtol=1e-4, atol=1e-5)


def test_a_step_that_did_not_end_leaves_nothing_in_the_next_ones_factors() -> None:
    layer = nn.Linear(3, 2)
    kfac = KFAC(layer.parameters(), **SETTINGS)
    kfac.watch([layer])
    for value in (float("nan"), 1.0):
        kfac.begin()
        layer.zero_grad()
        layer(torch.full((4, 3), value)).sum().backward()
    kfac.step()
    assert all(bool(parameter.isfinite().all()) for parameter in layer.parameters())


def test_derived_shared_and_frozen_layers_are_left_alone() -> None:
    class Derived(nn.Linear):
        pass

    frozen, shared = nn.Linear(2, 2), nn.Linear(2, 2)
    frozen.requires_grad_(False)
    again = nn.Linear(2, 2)
    again.weight = shared.weight
    plain, tied = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(Derived(2, 2), frozen, shared, again, plain, tied)
    assert list(preconditioned_layers(model, [tied.weight])) == [plain]


def trained(
    steps: range, kept: dict[str, Any] | None = None, weights: dict[str, Any] | None = None
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model after these steps of the batches, and its optimizer."""
    model, batches = make_model(), make_batches(8)
    model.load_state_dict(weights or model.state_dict())
    kfac = KFAC(model.parameters(), **SETTINGS)
    kfac.load_state_dict(kept or kfac.state_dict())
    kfac.watch(preconditioned_layers(model))
    for step in steps:
        kfac.begin()
        model.zero_grad()
        functional.mse_loss(model(batches[step][0]), batches[step][1]).backward()  # type: ignore[no-untyped-call]  # the library's
        kfac.step()
    return model, kfac


def test_goes_on_with_the_inverses_that_it_saved() -> None:
    """It stops after step 4, whose factors were taken in step 3."""
    whole, _ = trained(range(STEPS))
    first, kfac = trained(range(4))
    resumed, _ = trained(range(4, STEPS), kfac.state_dict(), first.state_dict())
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


def test_a_model_that_a_pipeline_would_trace_is_refused() -> None:
    asked = ["model.target=small_models:Mlp", "data=random_regression", "loss=mse", "optimizer=kfac", "device=cpu"]
    assert len(model_layers(resolve(asked))) == 1
    with pytest.raises(RequestError, match="traced into operators"):
        model_layers(resolve([*asked, "parallelism=pipeline", "parallelism.pipeline=2"]))


def test_an_input_is_dropped_once_its_factor_has_it() -> None:
    """Not only with the graph, which lives as long as the output does: a plan counts on that."""
    layer, given = nn.Linear(3, 2), torch.randn(4, 3)
    kfac = KFAC(layer.parameters(), **SETTINGS)
    kfac.watch([layer])
    kfac.begin()
    memory = weakref.ref(given.untyped_storage())
    output = layer(given)
    del given
    torch.autograd.backward(output.sum())
    assert kfac.tracked[0].inputs.rows == 4
    assert memory() is None
