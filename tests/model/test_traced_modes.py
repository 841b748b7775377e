"""One trace stands for training and evaluation where the model computes the same in both; and where it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from runner.config.compose.resolve import resolve
from runner.model.load import load_model
from runner.model.traced import operators
from runner.model.traced.modes import computes_alike
from runner.model.traced.operators import trace
from runner.model.traced.segments import split
from runner.model.traced.structure import structure_of_graph
from runner.profiling import alike
from runner.profiling.layer import profile_call
from runner.profiling.model import profile_model

LLAMA = ["model=huggingface", "model.kwargs.model_type=llama", "parallelism.pipeline=2", "schedule.microbatches=2"]


class Block(nn.Module):
    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.after = nn.Linear(4, 4), nn.Linear(4, 4), after

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.after(self.second(self.first(x)[..., :4] + 1.0))
        return made


class OtherWeight(Block):
    """It uses another weight in evaluation, by the same operators."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.first(x) if self.training else self.second(x)
        return made


class OtherOrder(Block):
    def forward(self, x: Tensor) -> Tensor:
        one, two = self.first(x), self.second(x)
        made: Tensor = one - two if self.training else two - one
        return made


class OtherNumber(Block):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.first(x) * (2.0 if self.training else 3.0)
        return made


class OtherOutput(Block):
    def forward(self, x: Tensor) -> Any:
        one, two = self.first(x), self.second(x)
        return (one, two) if self.training else (two, one)


def fake(make: Any, *args: Any) -> tuple[FakeTensorMode, nn.Module, Tensor]:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    with mode:
        return mode, make(*args), mode.from_tensor(torch.ones(3, 4))


@pytest.mark.parametrize(
    ("make", "after", "expected"),
    [
        (Block, nn.Identity, True),
        (Block, nn.LayerNorm, True),
        (Block, nn.Dropout, False),
        (Block, nn.BatchNorm1d, False),
        (OtherWeight, nn.Identity, False),
        (OtherOrder, nn.Identity, False),
        (OtherNumber, nn.Identity, False),
        (OtherOutput, nn.Identity, False),
    ],
)
def test_what_differs_between_the_modes_is_seen(make: Any, after: Any, expected: bool) -> None:
    mode, model, x = fake(lambda: make(after(4) if after is not nn.Dropout else after(0.1)))
    with mode:
        programs = trace(model, x, "m:f")
        assert (programs[False] is programs[True]) is expected
        assert model.training
        assert computes_alike(model, x) is expected


def test_a_model_of_real_tensors_is_traced_in_both_modes() -> None:
    model = Block(nn.Identity())
    assert not computes_alike(model, torch.ones(3, 4))
    programs = trace(model, torch.ones(3, 4), "m:f")
    assert programs[False] is not programs[True]


def test_graphs_are_compared_without_names() -> None:
    chain = nn.Sequential(*(Block(nn.Tanh()) for _ in range(3)), Block(nn.Sigmoid()))
    programs = trace(chain, torch.ones(3, 4), "m:f")
    starts = [i for i, node in enumerate(programs[True].nodes) if "linear" in str(node.target)][2::2]
    parts = [segment._parts[True].run for _, segment in split(chain, programs, starts)]
    first, second, third, last = map(structure_of_graph, parts)
    assert second == third
    assert last not in (first, second)


@pytest.mark.costly
def test_the_architectures_own_cuts_come_first() -> None:
    layers = load_model(resolve(LLAMA)).layers
    blocks = [f"model.layers.{at}" for at in range(4)]
    assert [layer.label for layer in layers] == [
        "model.embed_tokens..model.rotary_emb",
        *blocks,
        "model.norm",
        "lm_head",
    ]
    named = load_model(resolve([*LLAMA, "model.split_points=[model.layers.1]"])).layers
    assert len(named) == 2


def test_more_stages_than_the_architectures_cuts_are_cut_by_the_trace() -> None:
    few = ["model.kwargs.num_hidden_layers=1", "parallelism.pipeline=5", "schedule.microbatches=5"]
    assert len(load_model(resolve([*LLAMA, *few])).layers) >= 5


@pytest.mark.costly
def test_equal_blocks_are_traced_and_profiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The work of a plan grows little with the number of blocks."""
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path))
    export, work = operators._export, tmp_path / "work"  # a file, because the profile is made in a process of its own

    def counted(*args: Any) -> Any:
        _note(work, "export")
        return export(*args)

    def named(name: str, *args: Any) -> Any:
        _note(work, name)
        return profile_call(name, *args)

    monkeypatch.setattr(operators, "_export", counted)
    monkeypatch.setattr(alike, "profile_call", named)
    profile = profile_model(resolve([*LLAMA, "model.kwargs.num_hidden_layers=6", "hardware=a100_80gb"]))
    done = work.read_text().splitlines()
    profiled = [name for name in done if name != "export"]
    assert done.count("export") == 1
    assert len(profile.layers) == 9
    assert len(profiled) == 6, profiled  # embedding, first block, those between, last block, norm, head


def _note(file: Any, line: str) -> None:
    with file.open("a") as lines:
        lines.write(f"{line}\n")
