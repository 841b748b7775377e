"""A zoo of functions as models use them, and with layers the whole zoo."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from layer_zoo import LAYERS, Case, calling, numbers, of
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ZOO", "Case"]


def embeddings_and_indices() -> Iterator[tuple[str, Case]]:
    for options in ({}, {"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        yield f"embedding {options}", of(partial(nn.Embedding, 50, 9, **options), numbers(50, 4, 7))
    for mode in ("sum", "mean", "max"):
        make = partial(nn.EmbeddingBag, 50, 9, mode=mode)
        yield f"bags {mode}", of(make, numbers(50, 4, 7))
        yield f"bags with offsets {mode}", of(make, numbers(50, 20), lambda: torch.tensor([0, 4, 4, 11]))
    index = numbers(9, 4, 6)
    yield "gather", calling(lambda x, i: x.gather(1, i), (4, 9), index)
    yield "scatter", calling(lambda x, i, s: x.scatter(1, i, s), (4, 9), index, (4, 6))
    yield "scatter_add", calling(lambda x, i, s: x.scatter_add(1, i, s), (4, 9), index, (4, 6))
    for reduce in ("sum", "mean", "amax", "prod"):
        apply = lambda x, i, s, reduce=reduce: x.scatter_reduce(1, i, s, reduce)  # noqa: E731
        yield f"scatter_reduce {reduce}", calling(apply, (4, 9), index, (4, 6))
    rows = numbers(9, 6)
    yield "index_select", calling(lambda x, i: x.index_select(0, i), (9, 4), rows)
    yield "index_add", calling(lambda x, i, s: x.index_add(0, i, s), (9, 4), rows, (6, 4))
    yield "index", calling(lambda x, i: x[i], (9, 4), rows)
    yield "index_put", calling(lambda x, i, s: x.clone().index_put((i,), s, accumulate=True), (9, 4), rows, (6, 4))
    yield "take_along_dim", calling(lambda x, i: torch.take_along_dim(x, i, 1), (4, 9), index)
    yield "segment_reduce", calling(lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([2, 2])), (4, 5))
    adaptive = partial(nn.AdaptiveLogSoftmaxWithLoss, 16, 100, [20, 50])
    yield "adaptive softmax", of(adaptive, (30, 16), numbers(100, 30))


_REDUCED = (
    "L1Loss", "MSELoss", "HuberLoss", "SmoothL1Loss", "SoftMarginLoss", "KLDivLoss", "BCEWithLogitsLoss",
    "PoissonNLLLoss",
)  # fmt: skip


def losses() -> Iterator[tuple[str, Case]]:
    shape = (6, 9)
    for name in _REDUCED:
        for reduction in ("mean", "sum", "none"):
            make = partial(getattr(nn, name), reduction=reduction)
            yield f"{name} {reduction}", of(make, shape, lambda: torch.rand(shape))
    yield "MSELoss of a trained target", of(nn.MSELoss, shape, shape)
    yield (
        "BCELoss",
        calling(lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y), shape, lambda: torch.rand(shape)),
    )
    for options in ({}, {"label_smoothing": 0.1}, {"ignore_index": 2}, {"reduction": "none"}):
        make = partial(nn.CrossEntropyLoss, **options)
        yield f"cross entropy {options}", of(make, shape, numbers(9, 6))
        yield f"cross entropy of pixels {options}", of(make, (6, 9, 4, 4), numbers(9, 6, 4, 4))
    yield "cross entropy of weights", of(lambda: nn.CrossEntropyLoss(torch.ones(9)), shape, numbers(9, 6))
    yield "cross entropy of chances", of(nn.CrossEntropyLoss, shape, lambda: torch.rand(shape))
    yield "gaussian", of(nn.GaussianNLLLoss, shape, lambda: torch.rand(shape), lambda: torch.rand(shape))
    yield "hinge", of(nn.HingeEmbeddingLoss, shape, lambda: torch.ones(shape))
    yield "multi label", of(nn.MultiLabelSoftMarginLoss, shape, lambda: torch.ones(shape))
    yield (
        "multi label margin",
        of(nn.MultiLabelMarginLoss, (2, 4), lambda: torch.tensor([[3, 0, -1, 1], [1, 2, -1, 0]])),
    )
    yield "multi margin", of(nn.MultiMarginLoss, shape, numbers(9, 6))
    yield "ranking", of(nn.MarginRankingLoss, (5,), (5,), lambda: torch.ones(5))
    yield "triplet", of(nn.TripletMarginLoss, (5, 7), (5, 7), (5, 7))
    yield "cosine", of(nn.CosineEmbeddingLoss, (5, 7), (5, 7), lambda: torch.ones(5))
    yield "ctc", calling(ctc, (20, 3, 6), numbers(5, 3, 5))


def ctc(value: Tensor, target: Tensor) -> Tensor:
    lengths = torch.tensor([20, 20, 20]), torch.tensor([5, 4, 3])
    return functional.ctc_loss(value.log_softmax(2), target + 1, *lengths)


ZOO: dict[str, dict[str, Case]] = {
    family.__name__: dict(family()) for family in (*LAYERS, embeddings_and_indices, losses)
}
"""Cases by family and name."""
