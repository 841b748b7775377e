"""Drawn models of odd tensors in drawn layouts: each is equal to plain PyTorch over whole batches, or refused by name.

``ODD_DRAWS=500`` draws more than a few; ``ODD_FROM=1000`` others.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from odd_layers import KEPT, REFUSED
from odd_runs import OPTIMIZERS, assert_equal, in_plain_pytorch, in_stages, profile_of, with_a_resume, words_of

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.plan.make import make_plan

DRAWS, FIRST = int(os.environ.get("ODD_DRAWS", "24")), int(os.environ.get("ODD_FROM", "0"))
_DENSE_ALONE = {"sparse gradient"}  # torch's Adam and its clipping take no sparse gradients
_NOT_IN_FILES = {"fading"}  # a changed buffer that is registered with persistent=False, as PyTorch leaves it out

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:grad and param do not obey")


FOUND = (5099, 5441)  # weights of a class of their own, and sparse gradients


@pytest.mark.costly
@pytest.mark.parametrize("number", [*range(FIRST, FIRST + DRAWS), *FOUND])
def test_a_drawn_model_in_a_drawn_layout(number: int, tmp_path: Path) -> None:
    draw = random.Random(number)
    kinds = draw.choices([*KEPT], k=draw.randint(1, 4))
    if draw.random() < 0.1:
        refused = draw.choice([*REFUSED])
        with pytest.raises(RequestError, match=REFUSED[refused][1].split(" ")[1]):
            make_plan(resolve(words_of([refused, *kinds])), profile_of([refused, *kinds], 8))
        return
    optimizer = draw.choice([*OPTIMIZERS]) if not _DENSE_ALONE & {*kinds} else "sgd"
    microbatches, again = draw.choice([1, 2, 4]), draw.random() < 0.4
    clip = draw.choice([None, None, 0.1]) if not _DENSE_ALONE & {*kinds} else None
    expected = in_plain_pytorch(kinds, optimizer, clip)
    if draw.random() < 0.3 and not _NOT_IN_FILES & {*kinds}:
        words = ["activation_checkpoint=full"] * again + [f"trainer.grad_clip_norm={clip}"] * (clip is not None)
        found = with_a_resume(kinds, microbatches, tmp_path, *words, optimizer=optimizer)
    else:
        stages = draw.choice([1, 2])
        schedule = draw.choice(["1f1b", "gpipe"])
        found = in_stages(
            kinds, stages, microbatches, again=again, optimizer=optimizer, schedule=schedule, clip_norm=clip
        )
    assert_equal(found, expected, losses=1e-5)
