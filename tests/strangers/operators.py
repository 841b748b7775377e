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


def signals_and_pictures() -> Iterator[tuple[str, Case]]:
    for name in ["fft", "ifft", "rfft", "fft2", "ifft2", "rfft2", "fftn", "hfft"]:
        yield name, calling(getattr(torch.fft, name), (4, 8, 10))
    yield "irfft", calling(lambda x: torch.fft.irfft(torch.fft.rfft(x), n=10), (4, 10))
    yield "stft", calling(lambda x: torch.stft(x, 16, window=torch.ones(16), return_complex=True).abs(), (2, 100))
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        resize = partial(functional.interpolate, mode=mode)
        yield f"interpolate {mode}", calling(partial(resize, scale_factor=2), (2, 3, 6, 6))
        yield f"interpolate to a size {mode}", calling(partial(resize, size=(9, 5)), (2, 3, 6, 6))
    for mode, axes in (("linear", 1), ("trilinear", 3)):
        resize = partial(functional.interpolate, scale_factor=2, mode=mode)
        yield f"interpolate {mode}", calling(resize, (2, 3, *(6,) * axes))
    resize = partial(functional.interpolate, size=(9, 5), mode="bilinear", antialias=True)
    yield "interpolate smoothly", calling(resize, (2, 3, 6, 6))
    for mode in ("bilinear", "nearest", "bicubic"):
        sample = partial(functional.grid_sample, mode=mode, align_corners=False)
        yield f"grid_sample {mode}", calling(sample, (2, 3, 6, 6), (2, 4, 5, 2))
    sample = partial(functional.grid_sample, align_corners=False)
    yield "grid_sample of volumes", calling(sample, (2, 3, 6, 6, 6), (2, 4, 5, 5, 3))
    yield "affine_grid", calling(partial(functional.affine_grid, size=[2, 3, 6, 6], align_corners=False), (2, 2, 3))


_PRODUCTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "matmul": ((4, 5), (5,)), "dot": ((5,), (5,)), "outer": ((5,), (4,)), "addmm": ((4, 6), (4, 5), (5, 6)),
    "baddbmm": ((2, 4, 6), (2, 4, 5), (2, 5, 6)), "addbmm": ((4, 6), (2, 4, 5), (2, 5, 6)), "kron": ((2, 3), (4, 5)),
    "addmv": ((4,), (4, 5), (5,)), "addr": ((4, 5), (4,), (5,)), "cov": ((4, 5),), "atan2": ((4, 5), (4, 5)),
}  # fmt: skip


def products_and_matrices() -> Iterator[tuple[str, Case]]:
    yield "linear", of(partial(nn.Linear, 33, 17), (7, 5, 33))
    yield "linear no bias", of(partial(nn.Linear, 33, 17, bias=False), (7, 5, 33))
    yield "bilinear", of(partial(nn.Bilinear, 5, 7, 3), (4, 5), (4, 7))
    for power in (1.0, 2.0, 3.0):
        yield f"cdist {power}", calling(partial(torch.cdist, p=power), (2, 7, 5), (2, 9, 5))
        yield f"cdist of many {power}", calling(partial(torch.cdist, p=power), (2, 40, 5), (2, 30, 5))
        yield f"pdist {power}", calling(partial(functional.pdist, p=power), (7, 5))
    for equation, shapes in {
        "bij,bjk->bik": ((2, 3, 4), (2, 4, 5)), "bi,bj->bij": ((2, 3), (2, 4)), "bij,kj->bik": ((2, 3, 4), (5, 4)),
        "bhqd,bhkd->bhqk": ((2, 3, 4, 5), (2, 3, 6, 5)),
    }.items():  # fmt: skip
        yield f"einsum {equation}", calling(partial(torch.einsum, equation), *shapes)
    for name, factors in _PRODUCTS.items():
        yield name, calling(getattr(torch, name), *factors)
    yield "matmul of batches", calling(torch.matmul, (3, 1, 4, 5), (2, 5, 6))
    linalg = torch.linalg
    for name, function in {
        "inv": lambda x: linalg.inv(definite(x)), "cholesky": lambda x: linalg.cholesky(definite(x)), "det": linalg.det,
        "slogdet": linalg.slogdet, "svd": partial(linalg.svd, full_matrices=False), "svdvals": linalg.svdvals,
        "qr": linalg.qr, "eigh": lambda x: linalg.eigh(definite(x)), "eigvals": lambda x: linalg.eigvals(x).abs(),
        "solve": lambda x: linalg.solve(definite(x), torch.ones(5, 3)), "pinv": linalg.pinv, "lu": linalg.lu,
        "matrix_exp": linalg.matrix_exp, "matrix_power": partial(linalg.matrix_power, n=3), "norm": linalg.norm,
        "lstsq": lambda x: linalg.lstsq(x, torch.ones(*x.shape[:-1], 3)).solution,
        "matrix_norm": partial(linalg.matrix_norm, ord=2), "multi_dot": lambda x: linalg.multi_dot([x, x, x]),
        "triangular": lambda x: linalg.solve_triangular(definite(x).triu(), x, upper=True),
        "cholesky_solve": lambda x: torch.cholesky_solve(torch.ones(5, 3), linalg.cholesky(definite(x))),
        "cholesky_inverse": lambda x: torch.cholesky_inverse(linalg.cholesky(definite(x))),
    }.items():  # fmt: skip
        for shape in [(5, 5)] if name == "multi_dot" else [(5, 5), (3, 5, 5)]:
            yield f"{name} {shape}", calling(function, shape)
    yield "svd tall", calling(partial(linalg.svd, full_matrices=False), (7, 5))
    yield "qr tall", calling(linalg.qr, (7, 5))


def definite(value: Tensor) -> Tensor:
    """A positive definite matrix."""
    return value @ value.mT + torch.eye(5)


ZOO: dict[str, dict[str, Case]] = {
    family.__name__: dict(family())
    for family in (*LAYERS, embeddings_and_indices, losses, signals_and_pictures, products_and_matrices)
}
"""Cases by family and name."""
