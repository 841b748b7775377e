"""A hook may clip a weight by its own norm, and not a rank's part of the gradients where other ranks have more."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from runner.errors import RequestError
from runner.strategy.own_clipping import refusing_norms_of_a_part


def weights() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for weight in made:
        weight.grad = torch.full((3,), 5.0)
    return made


@pytest.mark.parametrize(("count", "divided"), [(2, False), (1, True)])
def test_a_norm_of_what_one_rank_has_is_refused(count: int, divided: bool) -> None:
    said = "on_before_optimizer_step = Mine: must not clip gradients by their norm.*Try trainer.grad_clip_norm"
    with pytest.raises(RequestError, match=said), refusing_norms_of_a_part("Mine", divided=divided):
        clip_grad_norm_(weights()[:count], 1.0)


def test_each_weight_may_be_clipped_alone() -> None:
    first, second = weights()
    with refusing_norms_of_a_part("Mine", divided=False):
        clip_grad_norm_(first, 1.0)
    assert first.grad is not None
    assert first.grad.norm() == pytest.approx(1.0)
    clip_grad_norm_([first, second], 1.0)  # as ever after the block
