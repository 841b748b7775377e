"""Attention Residuals: each sublayer reads an attention over depth, and layouts give what one process gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from layouts import train_in_threads
from reference import train
from torch import Tensor, nn

from runner.schedule.catalogue import registry
from runner.schedule.lowering.fuse import fuse_backwards
from runner.zoo.attnres import build
from runner.zoo.losses import cross_entropy

VOCABULARY, LENGTH, WIDTH = 11, 6, 8


def make_model(layers: int = 6, group: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*(make() for make in build(VOCABULARY, LENGTH, WIDTH, layers, group, heads=2).layers()))
    for name, parameter in made.named_parameters():
        if name.endswith(".query"):
            nn.init.normal_(parameter)  # a model that has learned: not all sources weigh the same
    return made


def by_formula(model: nn.Sequential, ids: Tensor, group: int) -> Tensor:
    """The definition, sublayer by sublayer, with sums over depth written out."""

    def read(query: Tensor, gain: Tensor, sources: list[Tensor]) -> Tensor:
        keys = [gain * v / (v.pow(2).mean(-1, keepdim=True) + torch.finfo(v.dtype).eps).sqrt() for v in sources]
        scores = torch.stack([key @ query for key in keys])
        shares = scores.exp() / scores.exp().sum(0)
        return sum((share[..., None] * v for share, v in zip(shares, sources, strict=True)), torch.zeros(()))

    layers: list[Any] = list(model)
    embedding, *blocks, head = layers
    sources = [embedding(ids)[0]]
    for number, block in enumerate(blocks):
        for sublayer, before in (("attention", block.before_attention), ("feed_forward", block.before_feed_forward)):
            made = getattr(block, sublayer)(read(before.query, before.norm.weight, sources))
            if sublayer == "attention" and number % group == 0:
                sources.append(made)
            else:
                sources[-1] = sources[-1] + made
    assert len(sources) == 1 + -(-len(blocks) // group)
    mixed = read(head.before.query, head.before.norm.weight, sources)
    logits: Tensor = head.to_logits(head.norm(mixed))
    return logits


@pytest.mark.parametrize(("layers", "group"), [(1, 1), (4, 1), (6, 2), (5, 3)])
def test_it_is_what_the_definition_says(layers: int, group: int) -> None:
    model = make_model(layers, group)
    ids = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(ids), by_formula(model, ids, group))


def test_at_first_all_sources_weigh_the_same() -> None:
    block: Any = build(VOCABULARY, LENGTH, WIDTH, 1, 1, heads=2).layers()[1]()
    sources = tuple(torch.randn(2, LENGTH, WIDTH) for _ in range(3))
    torch.testing.assert_close(block.before_attention(sources), sum(sources, torch.zeros(())) / 3)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="heads = 3 must divide width = 8"):
        build(VOCABULARY, LENGTH, WIDTH, 2, 1, heads=3)
    with pytest.raises(ValueError, match="group = 0 must be at least 1"):
        build(VOCABULARY, LENGTH, WIDTH, 2, 0, heads=2)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(VOCABULARY, (8, LENGTH + 1), generator=generator) for _ in range(2)]
    return [(ids[:, :-1], ids[:, 1:]) for ids in drawn]


def test_sources_cross_every_stage_and_no_bit_differs() -> None:
    options: dict[str, Any] = {"count": 4, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    model = make_model()
    expected = train(model, cross_entropy, batches(), **options)
    schedule = fuse_backwards(registry.build("zb_v", ranks=4, microbatches=4))
    losses, weights = train_in_threads(
        make_model, cross_entropy, batches(), pipeline=4, data=1, schedule=schedule, **options
    )
    assert [key for key, value in model.state_dict().items() if not torch.equal(weights[key], value)] == []
    assert all(rank == expected for rank in losses)
