"""Few bits per element and one fp32 number per tensor.

Sources: Alistarh et al. 2017, "QSGD"; Bernstein et al. 2018, "signSGD" (majority vote); Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD" (signs times the mean magnitude, with a residual).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from runner.optim.compression.bits import pack, unpack
from runner.optim.compression.rounds import Compress, Exchanged, Kept, Parts, Rounds, Turn, joined, split_like

__all__ = ["qsgd", "sign_sgd"]


def qsgd(levels: int) -> Compress:
    """Round each element at random to a multiple of its tensor's norm / levels, so that the mean is the element."""
    bits = (2 * levels).bit_length()

    def compress(values: Sequence[Tensor], kept: Sequence[Kept], turn: Turn) -> Rounds:
        flat = joined(values)
        norms = torch.stack([value.norm() for value in values])
        generator = torch.Generator(flat.device).manual_seed(turn.own_seed)
        dice = torch.rand(flat.shape, generator=generator, device=flat.device)
        shares = (flat / _of_elements(norms, values)).nan_to_num_(nan=0.0)  # a tensor of zeros has no shares
        steps = (shares.abs() * levels + dice).floor_().clamp_(max=levels) * shares.sign()
        message = torch.cat([norms.view(torch.uint8), pack((steps + levels).int(), bits)])

        def read(part: Tensor) -> Tensor:
            scales, codes = _parted(part, len(values))
            steps = unpack(codes, bits, flat.numel()).float() - levels
            return _of_elements(scales / levels, values) * steps

        left = flat - read(message)
        parts = yield Parts(message)
        return Exchanged(split_like(_sum(map(read, parts)), values), split_like(left, values), kept)

    return compress


def sign_sgd(*, vote: bool) -> Compress:
    """Send each element's sign, and each tensor's mean magnitude.

    Args:
        vote: whether the replicas vote on each sign; the sum is then the majority's sign times the sum of the mean
            magnitudes, and 0 where the votes are equal. Otherwise each replica's signs count with its own magnitude,
            as error feedback requires.
    """

    def compress(values: Sequence[Tensor], kept: Sequence[Kept], turn: Turn) -> Rounds:
        flat = joined(values)
        means = torch.stack([value.abs().mean() for value in values])
        message = torch.cat([means.view(torch.uint8), pack(flat >= 0, 1)])

        def read(part: Tensor) -> tuple[Tensor, Tensor]:
            scales, codes = _parted(part, len(values))
            return scales, unpack(codes, 1, flat.numel()).float() * 2 - 1

        def magnified(part: Tensor) -> Tensor:
            scales, signs = read(part)
            return _of_elements(scales, values) * signs

        left = flat - magnified(message)
        parts = yield Parts(message)
        if vote:
            votes = _sum(read(part)[1] for part in parts).sign_()
            total = votes * _of_elements(_sum(read(part)[0] for part in parts), values)
        else:
            total = _sum(map(magnified, parts))
        return Exchanged(split_like(total, values), split_like(left, values), kept)

    return compress


def _parted(message: Tensor, tensors: int) -> tuple[Tensor, Tensor]:
    """The fp32 numbers, one for each tensor, and the packed bits."""
    return message[: 4 * tensors].clone().view(torch.float32), message[4 * tensors :]


def _of_elements(of_tensors: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Each tensor's number for each of its elements, [elements]."""
    sizes = torch.tensor([value.numel() for value in values], device=of_tensors.device)
    return of_tensors.repeat_interleave(sizes, output_size=sum(value.numel() for value in values))


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, parts)
