"""Layers of TorchScript, scripted and traced, whose executor changes what it saves after its first runs."""

from functools import partial

import pytest
import torch
from layouts import train_in_threads
from requests_in_threads import SGD, in_plain_pytorch
from test_hooks import POLICIES
from torch import Tensor, nn
from torch.nn import functional

from runner.errors import RequestError
from runner.model.layers import build_stage, layers_of
from runner.model.precision import cast_module
from runner.model.traced.operators import trace

WIDTH = 6


class Block(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        self.count += 1.0
        return value + torch.tanh(self.norm(self.linear(value))) * torch.sigmoid(value)


@torch.jit.script
def gated(value: Tensor) -> Tensor:
    made: Tensor = value * torch.sigmoid(value) + torch.tanh(value)
    return made


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = gated(self.linear(value))
        return made


def make_model(kind: str) -> nn.Sequential:
    torch.manual_seed(3)
    block: nn.Module = WithFunction() if kind == "function" else Block()
    if kind == "scripted":
        block = torch.jit.script(block)
    if kind == "traced":
        block = torch.jit.trace(block, torch.randn(8, WIDTH), check_trace=False)  # type: ignore[no-untyped-call]
    if kind == "within another":
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(block))
    return nn.Sequential(nn.Linear(5, WIDTH), block, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = ((torch.randn(8, 5, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in range(5))
    return list(made)


@pytest.mark.costly
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["scripted", "traced", "within another", "function"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_equal_to_plain_pytorch(kind: str, policy: str) -> None:
    """Batches are whole, because batch norm's statistics are those of a micro-batch."""
    model = make_model(kind)
    expected = in_plain_pytorch(model, functional.cross_entropy, batches())
    for schedule in ("1f1b", "zb_h1") if policy == "none" else ("1f1b",):
        losses, weights = train_in_threads(
            partial(make_model, kind), functional.cross_entropy, batches(), schedule=schedule, pipeline=2, data=1,
            count=1, optimizer=SGD, prepare=POLICIES[policy],
        )  # fmt: skip
        torch.testing.assert_close(losses[0], expected, rtol=2e-6, atol=0.0)
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=2e-6, atol=2e-7)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_would_have_to_be_traced_is_refused_by_the_name_of_the_script() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model("scripted")

        def forward(self, value: Tensor) -> Tensor:
            made: Tensor = self.layers(value)
            return made

    with pytest.raises(RequestError, match=r"layers\.1 is a ScriptModule, into which torch\.export cannot look"):
        trace(Whole(), torch.randn(4, 5), "mine:model")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_and_format() -> None:
    stage = build_stage(layers_of(make_model("scripted"), 0), 0, 4)
    assert set(stage.global_state()) == set(make_model("scripted").state_dict())
    cast_module(stage, torch.bfloat16)
    assert {value.dtype for name, value in stage.global_state().items() if "tracked" not in name} == {torch.bfloat16}
