"""Cutting traced models: where, what crosses, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from narrow import present
from small_models import ZOO, Case, TiedGpt, UNet
from torch import nn

from runner.config.schema import DataConfig, LossConfig, ModelConfig, ParallelismConfig, RunConfig
from runner.errors import RequestError
from runner.model.layers import LayerSource
from runner.model.load import model_layers, segments_of
from runner.model.traced.cuts import crossing, good_cuts
from runner.model.traced.operators import trace
from runner.plan.requested_schedule import num_stages
from runner.profiling.model import profile_layers

TOKENS = torch.zeros(3, 6, dtype=torch.int64)


def chain(
    model: nn.Module, inputs: torch.Tensor | tuple[torch.Tensor, int], split_points: list[str] | None = None
) -> list[LayerSource]:
    return segments_of(model, trace(model, inputs, "m:f"), split_points, wanted=1)


def run(layers: list[LayerSource], value: Any) -> torch.Tensor:
    for layer in layers:
        value = present(layer.given)(value)
    assert isinstance(value, torch.Tensor)
    return value


def test_automatic_cuts_lie_between_sub_layers_and_every_weight_is_there_once() -> None:
    layers = chain(TiedGpt(), TOKENS)
    assert [layer.label for layer in layers if "blocks.1" in layer.label] == ["blocks.1", "blocks.1"]
    names = [name for layer in layers for name, _ in present(layer.given).named_parameters(remove_duplicate=False)]
    assert set(names) == set(dict(TiedGpt().named_parameters(remove_duplicate=False)))
    assert {name for name in names if names.count(name) > 1} == {"tokens.weight", "head.weight"}


def test_skip_tensors_are_carried_through() -> None:
    model = UNet()
    programs = trace(model, torch.randn(3, 2, 8, 8), "m:f")
    cuts = good_cuts(programs[True], programs[False], 1)
    assert max(len([n for n in crossed if "sym" not in n.name]) for crossed in crossing(programs[True], cuts)) >= 3


def test_split_points_by_name() -> None:
    model = TiedGpt()
    layers = chain(model, TOKENS, ["blocks.1", "head"])
    assert len(layers) == 3
    names = [name for name, _ in present(layers[1].given).named_parameters()]
    assert {".".join(name.split(".")[:2]) for name in names} == {"blocks.1", "blocks.2"}
    ids = torch.randint(0, 13, (1, 4))
    assert torch.equal(run(layers, ids), model(ids)), "one sample, and another length than the traced one"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("blocks.7", "No operator of such a module runs"),
        ("tokens", "No weights are used before it"),
        ("block.1", "blocks.1"),
    ],
)
def test_wrong_split_points_are_named(point: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        chain(TiedGpt(), TOKENS, [point])


def test_tensors_changed_in_place_stay_in_one_segment() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = self.first(x)
            view = kept.view(-1, 4)
            y = self.second(torch.tanh(view))
            kept.add_(1.0)  # changes the view, which is used again
            made: torch.Tensor = self.third(y) + view
            return made

    model = InPlace()
    layers = chain(model, torch.randn(3, 4))
    assert len(layers) == 2
    x = torch.randn(5, 4)
    assert torch.equal(run(layers, x), model(x))
    with pytest.raises(RequestError, match="changed in place"):
        chain(model, torch.randn(3, 4), ["second"])


def test_inputs_that_the_trace_does_not_cover_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: int) -> torch.Tensor:
            made: torch.Tensor = self.b(torch.tanh(self.a(x))) * scale
            return made

    layers = chain(Scaled(), (torch.randn(3, 4), 2))
    assert run(layers, [torch.randn(2, 4), 2]).shape == (2, 4)
    with pytest.raises(ValueError, match="traced with the input 2, got 3"):
        run(layers, (torch.randn(2, 4), 3))
    with pytest.raises(ValueError, match=r"traced with x of shape \(s\w+, 4\), got \(2, 5\)"):
        run(layers, (torch.randn(2, 5), 2))
    with pytest.raises(ValueError, match="traced with 2 inputs"):
        run(layers, (torch.randn(2, 4),))


# Requests: these targets are called by name


def untraceable() -> nn.Module:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.linear(x) if x.sum() > 0 else -self.linear(x)
            return made

    return Branches()


def two_parameters_over_one_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    return model


def traceable() -> nn.Module:
    return ZOO["mixture"].make()


def samples() -> Any:
    return torch.utils.data.TensorDataset(torch.randn(6, 8), torch.zeros(6, dtype=torch.int64))


def request(function: Callable[..., Any], pipeline: int = 2, **model: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(target=f"{__name__}:{function.__name__}", **model),
        data=DataConfig(target=f"{__name__}:samples"),
        loss=LossConfig(target="runner.zoo.losses:cross_entropy"),
        parallelism=ParallelismConfig(pipeline=pipeline),
    )


def test_what_cannot_be_traced_is_refused_with_the_users_line() -> None:
    with pytest.raises(RequestError) as caught:
        model_layers(request(untraceable))
    (problem,) = caught.value.problems
    assert "cannot be traced" in problem.line()
    assert "if x.sum() > 0" in problem.line(), "the line of the user's code"
    assert "\n" not in problem.line()
    assert len(model_layers(request(untraceable, pipeline=1))) == 1, "one process runs it as it is"


def test_what_layers_cannot_share_is_refused() -> None:
    with pytest.raises(RequestError, match="two parameters over one memory"):
        model_layers(request(two_parameters_over_one_memory))
    assert len(model_layers(request(two_parameters_over_one_memory, pipeline=1))) == 2


def test_split_points_do_not_apply_to_listed_layers() -> None:
    def refused() -> Any:
        return model_layers(request(two_parameters_over_one_memory, split_points=["1"]))

    with pytest.raises(RequestError, match="applies to a module without layers"):
        refused()


def test_a_traced_chain_is_profiled_on_fake_tensors() -> None:
    case: Case = ZOO["mixture"]
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    generator = torch.Generator().manual_seed(0)
    inputs, targets = case.inputs(4, generator), case.targets(4, generator)
    real = profile_layers(model_layers(request(traceable)), inputs, targets, case.loss, torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True) as mode:
        layers = model_layers(request(traceable))
        fake = profile_layers(layers, mode.from_tensor(inputs), mode.from_tensor(targets), case.loss, torch.float32)
    assert fake.layers == real.layers
    assert sum(row.num_parameters for row in fake.layers) == sum(p.numel() for p in case.make().parameters())


def test_callables_that_share_a_weight_are_refused() -> None:
    shared = nn.Linear(8, 8)

    class Hidden(nn.Module):
        def layers(self) -> list[Any]:
            return [lambda: shared, nn.Tanh, lambda: shared]

    from runner.model.layers import layers_of

    x = torch.randn(2, 8)
    with pytest.raises(RequestError, match="callables that share a weight"):
        profile_layers(layers_of(Hidden(), 0), x, x, nn.functional.mse_loss, torch.float32)


@pytest.mark.parametrize(("schedule", "chunks", "stages"), [("zb_v", None, 4), ("interleaved_1f1b", 3, 6)])
def test_there_is_a_segment_for_every_stage(schedule: str, chunks: int | None, stages: int) -> None:
    config = request(traceable)
    config.schedule.name, config.schedule.chunks = schedule, chunks
    assert num_stages(config) == stages
    assert len(model_layers(config)) >= stages


def test_more_stages_have_the_layers_of_two_unless_they_are_cut_finely() -> None:
    config, seen = request(traceable), set()
    config.schedule.name = "interleaved_1f1b"
    config.schedule.chunks = 1
    few = [layer.label for layer in model_layers(config)]
    for chunks in (1, 2, 3, 4, 8):
        config.schedule.chunks = chunks
        layers = model_layers(config)
        fine = any(layer.is_fine for layer in layers)
        assert fine == ([layer.label for layer in layers] != few)
        assert fine == (num_stages(config) > len(few) < len(layers))
        seen.add(fine)
    assert seen == {False, True}
