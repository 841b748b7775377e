"""What a first batch shows before a run: forwards that change weights or buffers, samples of other sizes, or few."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.launch.run.measured_plan import measured_plan
from runner.model.data import example_batch, example_of, load_datasets
from runner.profiling.meet import meet
from runner.profiling.model import faked_profile, profile_model
from runner.training.first_batches import first_batches

HERE = "test_what_a_first_batch_shows"
WIDTH, TOKENS, SHORT, LONG = 8, 7, 3, 40


class Scaling(nn.Module):
    """Looks up rows, which it scales where they are too long; numbers in, vectors out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.abs().long() % TOKENS).mean(1)  # type: ignore[no-any-return]


class Normalizing(nn.Module):
    """Subtracts a mean that it follows as it trains."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Forgetting(nn.Module):
    """Drops a buffer that only its first forward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first = self._buffers.pop("first", None)
        return x if first is None else x - first


class Again(nn.Module):
    """Runs forward again in a backward that knows no other way than ``backward()``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.linear, x, use_reentrant=True)
        return made


class Constrained(nn.Module):
    """Is traced, and writes into its buffers, which it then assigns again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = spectral_norm(nn.Linear(4, WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def scaling() -> nn.Sequential:
    return nn.Sequential(Scaling(), nn.Linear(WIDTH, 3))


def following() -> nn.Sequential:
    return nn.Sequential(Normalizing(), nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))


def forgetting() -> nn.Sequential:
    return nn.Sequential(Forgetting(), nn.Linear(4, 3))


def again() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, WIDTH), Again(), nn.Linear(WIDTH, 3))


class Skipped(nn.Module):
    """Is left out by chance, as in stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else x + torch.tanh(self.linear(x))


def skipping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, WIDTH), *(Skipped() for _ in range(8)), nn.Linear(WIDTH, 3))


class Counting(nn.Module):
    """Is traced, and computes with the length of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) / len(x))  # type: ignore[no-any-return]


def split() -> list[Subset[tuple[Tensor, ...]]]:
    return random_split(points(), [12, 4], torch.Generator().manual_seed(0))


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, 4, generator=generator), torch.randn(16, 3, generator=generator))


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """The first sample is the shortest."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(LONG if number else SHORT) % TOKENS
        return ids, ids


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same, one after the other."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (Sentences()[number] for number in range(64))


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    parts: tuple[tuple[Tensor, ...], ...] = tuple(zip(*samples, strict=True))
    inputs, targets = (nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in parts)
    return inputs, targets


def request(model: str, *words: str, data: str = "points", loss: str = "mse") -> RunConfig:
    named = [f"model.target={HERE}:{model}", f"data.target={HERE}:{data}", f"loss={loss}", "device=cpu"]
    return resolve([*named, "data.batch_size=8", *words])


def met(model: str, *words: str) -> None:
    config = request(model, *words)
    meet(config, profile_model(config), first_batches(config).training)


def test_a_forward_that_changes_weights_is_refused_with_replicas() -> None:
    met("scaling")
    with pytest.raises(
        RequestError, match=r"must be 1 with a model whose forward changes its weights.*0\.table\.weight"
    ):
        met("scaling", "parallelism.data=2")


def test_buffers_of_each_replica_are_told(caplog: pytest.LogCaptureFixture) -> None:
    met("following")
    met("plain", "parallelism.data=2")
    assert "each replica" not in caplog.text
    met("following", "parallelism.data=2")
    assert "each replica has its own 0.mean, which a forward changes" in caplog.text
    met("forgetting", "parallelism.data=2")
    assert "each replica has its own 0.first, which a forward changes" in caplog.text


def test_a_layer_may_run_forward_again_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        met("again")
    assert "no gradient" not in caplog.text


def test_buffers_that_are_written_into_and_assigned_are_traced() -> None:
    config = request("Constrained", "parallelism.pipeline=2")
    assert len(measured_plan(config).partition) == 2


def test_layers_that_are_skipped_by_chance_are_the_same_ones_in_each_profile() -> None:
    config = request("skipping")
    batch = example_batch(config.data, 4, 0)
    found = []
    for seed in range(4):
        random.seed(seed)
        found.append([layer.saved_bytes for layer in faked_profile(config, *batch).layers])
    assert all(each == found[0] for each in found)


def test_a_length_of_the_batch_is_followed() -> None:
    assert len(measured_plan(request("Counting", "parallelism.pipeline=2")).partition) == 2


def test_a_list_of_two_sets_is_taken_as_a_tuple_of_them() -> None:
    found = load_datasets(request("plain", data="split").data, 0)
    assert (len(found.train), len(found.validation)) == (12, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(("data", "looked_at"), [("Sentences", 15), ("Stream", 8)])
def test_the_largest_of_some_samples_is_planned(data: str, looked_at: int) -> None:
    config = request("plain", f"data.collate={HERE}:padded", data=data)
    inputs, _, found = example_of(config.data, 2, config.seed)
    assert (tuple(inputs.shape), found) == ((2, LONG), looked_at)
    assert example_of(request("plain").data, 2, config.seed).looked_at == 0


def embedded() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS))


def test_other_sizes_are_told() -> None:
    words = f"data.collate={HERE}:padded"
    plan = measured_plan(request("embedded", words, data="Sentences", loss="token_cross_entropy"))
    assert any("those of micro-batches of the largest of 15 samples" in line for line in plan.advice)


def test_a_set_that_is_smaller_than_a_step_is_told() -> None:
    found = first_batches(request("plain", "data.batch_size=1000"))
    (line,) = found.notes(1000)
    assert line.startswith("the training set has 16 samples, and no step takes more")
    assert found.notes(16) == []
