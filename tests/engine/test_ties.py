"""Weights in several stages: summed once, counted once, saved once, and what cannot be shared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of, train_in_threads
from reference import train
from small_models import Unembed, token_loss
from torch import nn

from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.layers import build_stage, layers_of
from runner.model.ties import find_ties, sharing_problems, with_all_names

sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def make_tied() -> nn.Sequential:
    torch.manual_seed(7)
    embedding = nn.Embedding(11, 6)
    block = nn.Linear(6, 6)
    return nn.Sequential(
        embedding, block, nn.Tanh(), nn.LayerNorm(6), block, nn.Tanh(), Unembed(embedding.get_parameter("weight"))
    )


def make_batches(batch: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(0, 11, (2, batch, 5), generator=generator)) for _ in range(4)]


@pytest.mark.parametrize("clip_norm", [None, 0.05], ids=["free", "clip"])
@pytest.mark.parametrize(("pipeline", "data"), [(1, 1), (2, 1), (3, 1), (4, 1), (3, 2)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_tied_weights_equal_one_process(schedule: str, pipeline: int, data: int, clip_norm: float | None) -> None:
    options: dict[str, Any] = {"count": 3, "clip_norm": clip_norm, "optimizer": sgd}
    model = make_tied()
    expected = train(model, token_loss, make_batches(), replicas=data, **options)
    losses, weights = train_in_threads(
        make_tied, token_loss, make_batches(), pipeline=pipeline, data=data, schedule=schedule, **options
    )
    torch.testing.assert_close(losses[0], expected, rtol=1e-6, atol=0)
    ties = find_ties(layers_of(make_tied(), 0))
    assert {tie.name for tie in ties} == {"0.weight", "1.weight", "1.bias"}
    assert set(weights) == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}, "each weight is saved once"
    own = make_tied()
    own.load_state_dict(with_all_names(weights, ties))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_copies_and_their_optimizer_states_stay_bitwise_equal() -> None:
    models = [make_tied() for _ in range(3)]
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def run(transport: ThreadTransport) -> None:
        def keep(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
            optimizers[transport.rank] = adamw(parameters)
            return optimizers[transport.rank]

        engine = make_engine(
            models[transport.rank], token_loss, transport, schedule="1f1b", pipeline=3, data=1, count=3, optimizer=keep
        )
        for batch in make_batches():
            engine.submit(part_of(batch, transport, 3, 1))
        engine.drain()

    run_ranks(3, run)
    first, middle, last = (model.get_parameter("0.weight") for model in models)
    assert torch.equal(first, last)
    assert not torch.equal(first, middle), "the middle rank holds no copy"
    for key, value in optimizers[0].state[first].items():
        assert torch.equal(value, optimizers[2].state[last][key]), key


def test_a_frozen_tied_weight_needs_no_gradient() -> None:
    def frozen() -> nn.Sequential:
        model = make_tied()
        model[0].weight.requires_grad_(False)
        return model

    options: dict[str, Any] = {"count": 3, "optimizer": sgd}
    expected = train(frozen(), token_loss, make_batches(), **options)
    losses, weights = train_in_threads(
        frozen, token_loss, make_batches(), pipeline=3, data=1, schedule="1f1b", **options
    )
    torch.testing.assert_close(losses[0], expected, rtol=1e-6, atol=0)
    assert torch.equal(weights["0.weight"], frozen().get_parameter("0.weight"))


def test_a_stage_loads_a_tied_weight_by_its_first_name() -> None:
    source = make_tied()
    stage = build_stage(layers_of(source, 0), 4, 6)
    state = {name: torch.full_like(value, 3.0) for name, value in stage.global_state().items()}
    assert set(state) == {"0.weight", "1.weight", "1.bias"}
    stage.load_global_state(state)
    assert bool((source.get_parameter("0.weight") == 3.0).all())


def test_names_of_a_listed_layer_that_is_used_twice() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([block, nn.Tanh(), block])

        def layers(self) -> list[nn.Module]:
            return list(self.blocks)

    model = Listed()
    ties = find_ties(layers_of(model, 0))
    assert [tie.places for tie in ties] == [
        ((0, "blocks.0.weight"), (2, "blocks.2.weight")),
        ((0, "blocks.0.bias"), (2, "blocks.2.bias")),
    ]
    assert set(model.state_dict()) == {name for tie in ties for _, name in tie.places}


def test_memory_behind_two_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight.data = model[0].weight.data
    (problem,) = sharing_problems(layers_of(model, 0), "m:f")
    assert "0.weight and 2.weight are two parameters over one memory" in problem.line()


def test_running_statistics_in_two_stages_are_refused() -> None:
    norm = nn.BatchNorm1d(4)
    (problem,) = sharing_problems(layers_of(nn.Sequential(norm, nn.Linear(4, 4), norm), 0), "m:f")
    assert "0 keeps running statistics and is used in layers 0, 2" in problem.line()
    assert sharing_problems(layers_of(make_tied(), 0), "m:f") == []
