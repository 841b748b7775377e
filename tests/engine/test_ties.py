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
from runner.schedule.catalogue.registry import build

sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def make_tied() -> nn.Sequential:
    """The first and the last layer share a weight, and one block is two layers."""
    torch.manual_seed(7)
    embedding = nn.Embedding(11, 6)
    block = nn.Linear(6, 6)
    middle = [block, nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), block, nn.Tanh()]
    return nn.Sequential(embedding, *middle, Unembed(embedding.get_parameter("weight")))


def make_batches(batch: int = 14) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(0, 11, (2, batch, 5), generator=generator)) for _ in range(4)]


@pytest.mark.parametrize(
    ("name", "ranks", "count", "data", "variant"),
    [
        ("1f1b", 3, 3, 1, {}),
        ("zb_v", 2, 4, 2, {}),
        ("pipefb", 3, 4, 1, {}),
        ("chimera", 4, 4, 1, {"pipes": 4}),
    ],
)
def test_tied_weights_equal_one_process(name: str, ranks: int, count: int, data: int, variant: dict[str, Any]) -> None:
    """On two ranks, on one where a V meets, and in both copies of stages; a norm counts them once."""
    schedule = build(name, ranks=ranks, microbatches=count, **variant)
    options: dict[str, Any] = {"count": count, "clip_norm": 0.05, "optimizer": sgd}
    model, batches = make_tied(), make_batches()
    expected = train(model, token_loss, batches, replicas=data, **options)
    losses, weights = train_in_threads(
        make_tied, token_loss, batches, pipeline=ranks, data=data, schedule=schedule, **options
    )
    for each in losses:
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=0)
    ties = find_ties(layers_of(make_tied(), 0))
    assert {tie.name for tie in ties} == {"0.weight", "1.weight", "1.bias"}
    assert {"6.weight", "6.bias", "8.weight"}.isdisjoint(weights), "each weight is saved once"
    own = make_tied()
    own.load_state_dict(with_all_names(weights, ties))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(own.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_a_tied_weight_that_meets_on_one_rank_travels_nowhere() -> None:
    schedule = build("zb_v", ranks=2, microbatches=4)
    models = [make_tied() for _ in range(2)]

    def run(transport: ThreadTransport) -> tuple[bool, set[int]]:
        engine = make_engine(
            models[transport.rank], token_loss, transport, schedule=schedule, pipeline=2, data=1, count=4, optimizer=sgd
        )
        shared = {number for number, held in enumerate(engine.tied_gradients) if "0.weight" in held.names}
        assert not any("0.weight" in held.names for held in engine.gradients.values())
        first, last = engine.stages.get(0), engine.stages.get(3)
        return first is not None and last is not None and first.layers[0].weight is last.layers[-1].weight, shared

    here, there = run_ranks(2, run)
    assert here[0], "one parameter, used by two stages"
    assert len(here[1]) == 1, "with one gradient, of neither stage alone"
    assert there == (False, set())


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
    stage = build_stage(layers_of(source, 0), 6, 8)
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
