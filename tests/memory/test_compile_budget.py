"""Compiled layers that keep a share of their activations."""

from __future__ import annotations

import copy

import pytest
import torch
from test_graph_programs import refused
from torch import nn

from runner.model.compiled import compile_layers
from runner.model.layers import StageModule, build_stage, layers_of


def test_it_needs_compiled_layers() -> None:
    told = refused("activation_checkpoint=compile_budget")
    assert told.startswith("compile = false: must be true with activation_checkpoint=compile_budget.")
    assert "Try compile=true" in told


@pytest.mark.parametrize("share", ["-0.1", "1.5"])
def test_a_share_is_a_part(share: str) -> None:
    words = "activation_checkpoint=compile_budget", f"activation_checkpoint.share={share}", "compile=true"
    assert refused(*words).startswith(f"activation_checkpoint.share = {share}: must be from 0 to 1.")


def saved_bytes(stage: StageModule, inputs: torch.Tensor, share: float | None) -> tuple[int, list[torch.Tensor]]:
    """Bytes that autograd saves in a forward, without weights and the input; and the gradients of the weights."""
    made = copy.deepcopy(stage)
    if share is not None:
        torch._dynamo.reset()
        compile_layers(made, share=share)
    own = {parameter.untyped_storage().data_ptr() for parameter in made.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = made(inputs)
    output.square().mean().backward()
    return sum(saved.values()), [each.grad for each in made.parameters() if each.grad is not None]


@pytest.mark.costly
def test_a_smaller_share_keeps_less_with_gradients_that_are_equal_to_rounding() -> None:
    import torch._functorch.config as functorch

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.back = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.back(torch.sigmoid(self.linear(value)).exp())
            return made

    torch.manual_seed(0)
    stage, inputs = build_stage(layers_of(nn.Sequential(Layer()), 0), 0, 0), torch.randn(32, 16)
    before = functorch.activation_memory_budget
    try:
        plain, expected = saved_bytes(stage, inputs, None)
        found = [saved_bytes(stage, inputs, share) for share in (1.0, 0.0)]
    finally:
        functorch.activation_memory_budget = before
        torch._dynamo.reset()
    (most, _), (least, _) = found
    assert least < min(plain, most)
    for _, gradients in found:
        for each, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)
