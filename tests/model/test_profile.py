"""Bytes, parameters and FLOPs of layers, against counts by hand; fake tensors against real ones."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from narrow import present
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import mse_loss

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.model.data import example_batch, load_loss
from runner.model.layers import layers_of
from runner.model.make import load_layers
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers, profile_model

VOCABULARY, LENGTH, WIDTH, HEADS, SAMPLES = 512, 64, 128, 4, 4


def profiled(*overrides: str, fake: bool, dtype: torch.dtype = torch.float32, samples: int = SAMPLES) -> ModelProfile:
    config = resolve([*overrides, "device=cpu"])
    inputs, targets = example_batch(config.data, samples, config.seed)
    loss = load_loss(config.loss)
    if not fake:
        return profile_layers(load_layers(config.model, 0), inputs, targets, loss, dtype)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        sources = load_layers(config.model, 0)
        return profile_layers(sources, mode.from_tensor(inputs), mode.from_tensor(targets), loss, dtype)


@pytest.mark.costly
@pytest.mark.parametrize(("dtype", "model"), [(torch.bfloat16, "gpt"), (torch.float32, "mlp")])
def test_fake_tensors_give_the_bytes_of_real_ones(model: str, dtype: torch.dtype) -> None:
    fake, real = (profiled(f"model={model}", fake=kind, dtype=dtype) for kind in (True, False))
    assert fake.layers == real.layers
    assert fake.loss.saved_bytes == real.loss.saved_bytes
    # The CPU's mse_loss reduces within a buffer of all its elements, which fake tensors do not know.
    assert abs(fake.loss.forward_transient_bytes - real.loss.forward_transient_bytes) <= real.target_bytes


def test_gpt_by_hand() -> None:
    profile = profiled("model=gpt", fake=True)
    embedding, *blocks, head = profile.layers
    linear = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    block = sum(i * o + o for i, o in linear) + 2 * 2 * WIDTH
    assert embedding.num_parameters == (VOCABULARY + LENGTH) * WIDTH
    assert [row.num_parameters for row in blocks] == [block] * 4
    assert head.num_parameters == 2 * WIDTH + WIDTH * VOCABULARY
    for row in profile.layers:
        assert row.weight_bytes == row.gradient_bytes == 4 * row.num_parameters
    tokens = SAMPLES * LENGTH
    assert [row.output_bytes for row in (embedding, *blocks)] == [4 * tokens * WIDTH] * 5
    assert head.output_bytes == 4 * tokens * VOCABULARY
    assert head.forward_flops == 2 * tokens * WIDTH * VOCABULARY
    assert head.backward_flops == 2 * head.forward_flops
    products = sum(2 * tokens * i * o for i, o in linear)
    assert blocks[0].forward_flops >= products
    assert blocks[0].forward_flops <= products + 2 * 2 * tokens * LENGTH * WIDTH, "attention counts at most in full"
    assert profile.tokens_per_sample == LENGTH
    assert profile.samples == SAMPLES


def test_a_linear_layer_by_hand() -> None:
    batch, inputs, outputs = 8, 32, 16
    sources = layers_of(nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh(), nn.Linear(outputs, outputs)), 0)
    profile = profile_layers(sources, torch.randn(batch, inputs), torch.randn(batch, outputs), mse_loss, torch.float32)
    linear, tanh, second = profile.layers
    assert linear.num_parameters == inputs * outputs + outputs
    assert linear.forward_flops == 2 * batch * inputs * outputs
    assert linear.backward_flops == linear.forward_flops, "nobody asks for the gradient of the batch"
    assert second.backward_flops == 2 * second.forward_flops
    assert linear.output_bytes == 4 * batch * outputs
    assert linear.saved_bytes == linear.output_bytes, "its output is alive; its input belongs to the layer before"
    assert tanh.forward_flops == 0
    assert linear.largest_parameter_bytes == 4 * inputs * outputs


class Carries(nn.Module):
    """Hands its input on beside a result."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, value: torch.Tensor | dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        value = value if isinstance(value, dict) else {"skip": self.linear(value), "x": value}
        return {"skip": value["skip"], "x": torch.tanh(self.linear(value["x"]))}


def test_what_is_carried_is_one_tensor() -> None:
    sources = layers_of(nn.Sequential(Carries(8), Carries(8)), 0)
    x = torch.randn(4, 8)
    profile = profile_layers(sources, x, x, lambda out, y: mse_loss(out["x"] + out["skip"], y), torch.float32)
    first, second = profile.layers
    (skip, between), (carried, last) = first.output, second.output
    assert carried == skip
    assert len({skip.storage, between.storage, last.storage}) == 3
    assert second.output_bytes == 2 * 128
    assert second.output_gradient_bytes == 2 * 128
    assert set(second.saves) == {between.storage, last.storage}, "the linear layer its input, tanh its output"
    assert present(second.chained_backward_bytes) < present(second.backward_transient_bytes)


def test_in_place_layers_are_profiled() -> None:
    sources = layers_of(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)), 0)
    profile = profile_layers(sources, torch.randn(2, 4), torch.randn(2, 4), mse_loss, torch.float32)
    assert [row.num_parameters for row in profile.layers] == [0, 20, 0]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.target=user_code:breaking", "model.kwargs.what=none", "model.kwargs.calls=0"), "layer 1 (Breaks)"),
        (("model.target=user_code:breaking", "model.kwargs.what=short", "model.kwargs.calls=0"), "layer 3 (Linear)"),
        (("loss.target=user_code:per_sample",), "must return a scalar mean over its samples, or (sum, weight)"),
        (("data.target=runner.zoo.data:random_regression",), "layer 0 (Linear) must take what the data gives"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_a_problem_of_the_request(
    overrides: tuple[str, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    user = ("model.target=user_code:model", "data.target=user_code:points", "loss.target=user_code:mean")
    if overrides[0].startswith("data."):
        sizes = {"inputs": 9, "outputs": 5, "samples": 8, "val_samples": 0, "seed": 0}
        overrides += tuple(f"data.kwargs.{name}={size}" for name, size in sizes.items())
    with pytest.raises(RequestError) as caught:
        profile_model(resolve([*user, *overrides, "device=cpu"]))
    assert said in str(caught.value)
    assert caplog.text == ""


@pytest.mark.costly
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_a_whole_language_model_has_the_same_bytes_on_fake_tensors(architecture: str) -> None:
    """It makes the same masks on both, although fake positions have no values that tell whether a row is one text."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_model = [f"model.kwargs.model_type={architecture}", *(f"+model.kwargs.{k}={v}" for k, v in sizes.items())]
    data = ["data=random_tokens", "data.kwargs.vocab_size=64", "data.kwargs.sequence_length=16"]
    asked = ["model=huggingface", *of_model, *data]
    if architecture == "bert":
        asked.append("model.kwargs.task=masked")
    fake, real = (profiled(*asked, fake=kind) for kind in (True, False))
    assert fake.layers == real.layers
