"""Matrices as products of two thin factors, which are summed over replicas; vectors are sent whole.

A matrix is a tensor's first axis times all others. Where the factors have no fewer elements, it is sent whole, too. The
residual of a replica is its matrix without its own part of the sum. So the residuals of all replicas add up to the sum
of their matrices without what was applied.

Sources: Vogels et al. 2019, "PowerSGD", algorithm 1, with the last step's factor as the start of the next; Cho et al.
2019, "GradZip", from memory: alternating least squares with a small ridge, one half of an alternation per step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from runner.optim.compression.rounds import Compress, Exchanged, Kept, Rounds, Total, Turn, joined, split_like

__all__ = ["grad_zip", "power_sgd"]

_Sums: TypeAlias = Generator[Total, Tensor, tuple[dict[int, Tensor], list[Tensor]]]

_RIDGE = 1e-10
"""The ridge, as a share of the factor's mean square: it only keeps a factor with dependent columns invertible."""


def power_sgd(rank: int) -> Compress:
    """One power iteration: P = M Q, summed and made orthonormal; Q = M^T P, summed; the sum of matrices is P Q^T."""

    def compress(values: Sequence[Tensor], kept: Sequence[Kept], turn: Turn) -> Rounds:
        tensors = _Tensors(values, lambda rows, columns: rank * (rows + columns) < rows * columns)
        starts = tensors.factors(kept, "right", 1, rank, turn.shared_seed)
        lefts, whole = yield from tensors.sum({at: m @ starts[at] for at, m in tensors.thin.items()}, with_whole=True)
        bases = {at: torch.linalg.qr(left).Q for at, left in lefts.items()}
        own = {at: m.T @ bases[at] for at, m in tensors.thin.items()}
        rights, _ = yield from tensors.sum({at: right.clone() for at, right in own.items()}, with_whole=False)
        sums = {at: bases[at] @ right.T for at, right in rights.items()}
        parts = {at: bases[at] @ right.T for at, right in own.items()}
        return tensors.exchanged(whole, sums, parts, {at: {"right": right} for at, right in rights.items()})

    return compress


def grad_zip(rank: int) -> Compress:
    """Fit one factor to the matrices while the other one stays: the left one at even steps, the right one at odd steps.

    With Q fixed, P = M Q (Q^T Q + ridge)^-1 is the least-squares fit of M by P Q^T, and a sum of fits is the fit of the
    sum. So only one factor is sent in each step.
    """

    def compress(values: Sequence[Tensor], kept: Sequence[Kept], turn: Turn) -> Rounds:
        tensors = _Tensors(values, lambda rows, columns: rank < min(rows, columns))
        fitted, fixed = ("left", "right") if turn.step % 2 == 0 else ("right", "left")
        others = tensors.factors(kept, fixed, 1 if fixed == "right" else 0, rank, turn.shared_seed)

        def turned(matrix: Tensor) -> Tensor:
            return matrix if fitted == "left" else matrix.T

        own = {at: _fit(turned(m), others[at]) for at, m in tensors.thin.items()}
        fits, whole = yield from tensors.sum({at: fit.clone() for at, fit in own.items()}, with_whole=True)
        sums = {at: turned(fit @ others[at].T) for at, fit in fits.items()}
        parts = {at: turned(fit @ others[at].T) for at, fit in own.items()}
        keeps = {at: {fitted: fit, fixed: others[at]} for at, fit in fits.items()}
        return tensors.exchanged(whole, sums, parts, keeps)

    return compress


def _fit(matrix: Tensor, factor: Tensor) -> Tensor:
    """The X for which X factor^T is nearest to the matrix; in float64, because the factor is squared."""
    wide = factor.double()
    square = wide.T @ wide
    square += _RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype, device=square.device)
    solved: Tensor = torch.linalg.solve(square, wide.T)
    return matrix @ solved.T.float()


class _Tensors:
    """One stage's tensors: ``thin`` has those that factors replace, as matrices by place; others are sent whole."""

    def __init__(self, values: Sequence[Tensor], is_thin: Callable[[int, int], bool]) -> None:
        self._values = values
        matrices = {at: value.flatten(1) for at, value in enumerate(values) if value.dim() > 1}
        self.thin = {at: matrix for at, matrix in matrices.items() if is_thin(*matrix.shape)}
        self._whole = [value for at, value in enumerate(values) if at not in self.thin]

    def factors(self, kept: Sequence[Kept], key: str, axis: int, rank: int, seed: int) -> dict[int, Tensor]:
        """The kept factor of each thin matrix, [length of its axis, rank]; random if there is none, or only zeros."""
        first = self._values[0]
        generator = torch.Generator(first.device).manual_seed(seed)
        found = {}
        for at, matrix in self.thin.items():
            factor = kept[at].get(key)
            if factor is None or not factor.any():
                factor = torch.randn(matrix.shape[axis], rank, generator=generator, device=first.device)
            found[at] = factor
        return found

    def sum(self, factors: Mapping[int, Tensor], *, with_whole: bool) -> _Sums:
        """Sum the factors over the replicas, and what is sent whole, in one message; they may share its memory."""
        sent = [*factors.values(), *(self._whole if with_whole else ())]
        if not sent:
            return {}, []
        came = split_like((yield Total(joined(sent))), sent)
        return dict(zip(factors, came, strict=False)), came[len(factors) :]

    def exchanged(
        self,
        whole: Sequence[Tensor],
        sums: Mapping[int, Tensor],
        parts: Mapping[int, Tensor],
        kept: Mapping[int, Kept],
    ) -> Exchanged:
        """The result, from the sums of what was sent whole, and the sums of thin matrices and this replica's parts."""
        totals, lefts, others = [], [], iter(whole)
        for at, value in enumerate(self._values):
            if at in self.thin:
                totals.append(sums[at].reshape(value.shape))
                lefts.append(value - parts[at].reshape(value.shape))
            else:
                totals.append(next(others))
                lefts.append(torch.zeros_like(value))
        return Exchanged(totals, lefts, [kept.get(at, {}) for at in range(len(self._values))])
