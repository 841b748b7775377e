"""What a model does around its layers is done or refused, and the modes of its parts are those of a plain loop."""

from __future__ import annotations

import pytest
import torch
from around_layers import AROUND, MODES, build, data
from requests_in_threads import SGD, trained
from torch.nn import functional

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.model.load import load_model
from runner.profiling.whole_forward import refuse_another_forward

STEPS, BATCH = 4, 8


def in_plain_pytorch(kind: str, microbatches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A loop that accumulates over micro-batches and validates after each step, with the modes that were before."""
    model = build(kind)
    if kind != "a part in evaluation mode":
        model.train()
    optimizer, losses = SGD(model.parameters()), []
    inputs, targets = data().tensors
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        rows = slice(step * BATCH, (step + 1) * BATCH)
        for x, y in zip(inputs[rows].chunk(microbatches), targets[rows].chunk(microbatches), strict=True):
            loss = functional.mse_loss(model(x), y) / microbatches
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            total += loss.item()
        optimizer.step()
        losses.append(total)
        modes = [(part, part.training) for part in model.modules()]
        model.eval()
        for part, mode in modes:
            part.training = mode
    return losses, {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


def words(kind: str) -> list[str]:
    named = ["model.target=around_layers:build", f"model.kwargs.kind='{kind}'", "data.target=around_layers:data"]
    return [*named, f"data.batch_size={BATCH}", "loss=mse", "optimizer=sgd"]


@pytest.mark.parametrize("kind", [*MODES, *AROUND])
def test_as_in_plain_pytorch(kind: str) -> None:
    """With a validation after each step, which must give the modes back."""
    losses, state = trained(words(kind), pipeline=2, microbatches=2, steps=STEPS, validates=True)
    expected, weights = in_plain_pytorch(kind, 2)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert state.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_what_no_layer_would_call_is_refused() -> None:
    with pytest.raises(RequestError, match=r"nothing around its layers\(\). It has a forward hook"):
        load_model(resolve(["model.target=around_layers:listed_with_hook", *words("")[2:], "device=cpu"]))


@pytest.mark.parametrize("target", ["Listed", "Doubled"])
def test_a_forward_that_is_more_than_the_layers_is_refused(target: str) -> None:
    model = load_model(resolve([f"model.target=around_layers:{target}", *words("")[2:], "device=cpu"]))
    inputs = data().tensors[0][:BATCH]
    if target == "Listed":
        refuse_another_forward(model, inputs, target)
        return
    with pytest.raises(RequestError, match=r"must have a forward that runs its layers\(\) one after the other"):
        refuse_another_forward(model, inputs, target)
