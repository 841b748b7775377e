"""The place in the data: the same samples, drawn alike, whoever loads them and from wherever they go on."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from resume_zoo import Noisy

from runner.model.seeds import seeded
from runner.training.data.loading import StepSampler, first_batch, make_loader
from runner.training.random_state import random_state, set_random_state
from runner.training.resume import History, Progress


def loader(**changed: Any) -> Any:
    options: dict[str, Any] = {
        "batch_size": 8,
        "data": 1,
        "replica": 0,
        "inputs": True,
        "targets": True,
        "shuffle": True,
        "seed": 5,
    }
    return make_loader(Noisy(44), 44, **{**options, **changed})


def inputs_of(made: Any, epoch: int) -> list[torch.Tensor]:
    made.batch_sampler.set_epoch(epoch)
    return [batch.inputs for batch in made]


def samples_of(sampler: StepSampler) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(step.epoch, step.step, step.samples) for step in sampler]


@pytest.mark.parametrize("step", [0, 1, 5, 6])
def test_a_sampler_goes_on_within_an_epoch_and_then_with_whole_ones(step: int) -> None:
    whole, resumed = (StepSampler(44, 8, data=2, replica=1, shuffle=True, seed=3) for _ in range(2))
    resumed.resume_at(2, step)
    assert len(resumed) == len(whole) == 6
    for epoch in (2, 3):
        whole.set_epoch(epoch)
        resumed.set_epoch(epoch)
        assert samples_of(resumed) == samples_of(whole)[step if epoch == 2 else 0 :]


def test_two_workers_go_on_where_none_stopped() -> None:
    expected = [inputs_of(loader(), epoch) for epoch in (1, 2)]
    resumed = loader(workers=2)
    resumed.batch_sampler.resume_at(1, 4)
    found = [inputs_of(resumed, epoch) for epoch in (1, 2)]
    assert [len(epoch) for epoch in found] == [2, 6]
    for one, other in zip([*expected[0][4:], *expected[1]], [*found[0], *found[1]], strict=True):
        assert torch.equal(one, other)


def test_random_samples_change_with_the_epoch_and_nothing_else() -> None:
    plain = loader(shuffle=False)
    first, again, later = inputs_of(plain, 0), inputs_of(plain, 0), inputs_of(plain, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, later, strict=True))
    other_seed = inputs_of(loader(shuffle=False, seed=6), 0)
    assert not torch.equal(first[0], other_seed[0])


def test_the_ends_of_a_pipeline_and_any_replicas_get_the_same_samples() -> None:
    whole = inputs_of(loader(), 0)
    parts = [inputs_of(loader(data=2, replica=replica), 0) for replica in range(2)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([part[step] for part in parts]), batch)


def test_a_look_at_the_first_batch_moves_nothing() -> None:
    looked = loader(workers=2)
    looked.batch_sampler.resume_at(0, 3)
    state = torch.get_rng_state()
    seen = first_batch(looked).inputs
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(next(iter(looked)).inputs, seen)
    assert torch.equal(seen, inputs_of(loader(), 0)[3])


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))]


def test_random_states_come_back_through_a_file(tmp_path: Any) -> None:
    draw()
    torch.save(random_state(), tmp_path / "state")
    expected = draw()
    set_random_state(torch.load(tmp_path / "state", weights_only=True))
    assert draw() == expected


def test_every_rank_takes_its_own_random_state_again() -> None:
    saved = {rank: {"of": rank} for rank in range(3)}
    progress = Progress(3, 3, None, History(), saved, {}, "")
    assert [progress.random_of(rank)["of"] for rank in range(5)] == [0, 1, 2, 0, 0], "a new rank takes the first one's"


def test_a_seeded_block_leaves_the_generators_alone() -> None:
    state = random_state()
    expected = draw()
    set_random_state(state)
    with seeded(1, 2):
        inside = draw()
    with seeded(1, 2):
        assert draw() == inside
    with seeded(2, 1):
        assert draw() != inside
    assert draw() == expected
