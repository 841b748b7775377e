"""``data.batch_size=max``: the size that is found fits, the next does not, and what cannot be found is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_command import gpt, in_own_place
from torch.utils.data import Dataset

from runner.cli.main import main
from runner.launch.run.largest_batch import largest


@pytest.fixture(autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_own_place(tmp_path_factory, tmp_path, monkeypatch)
    monkeypatch.setattr("runner.profiling.model.apart", lambda function, *given: function(*given))


def test_the_largest_number_is_found_wherever_one_begins_and_few_are_asked() -> None:
    for most in (1, 2, 7, 1000):
        for border in sorted({0, 1, most // 3, most - 1, most}):
            for guess in (0, 1, border, border + 1, most // 2, 3 * most):
                asked = list[int]()

                def fits(number: int, border: int = border, asked: list[int] = asked) -> bool:
                    asked.append(number)
                    return number <= border

                assert largest(fits, guess, most) == border
                assert len(asked) == len(set(asked)), "none twice"
                assert all(1 <= each <= most for each in asked)
                assert len(asked) <= 2 + 2 * most.bit_length()
                if guess == border > 0:
                    assert len(asked) <= 2


def planned(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    """The document of ``runner plan --json``."""
    assert main(["plan", *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.costly
@pytest.mark.parametrize(
    "layout",
    [
        ("parallelism.pipeline=2", "parallelism.data=2", "schedule.microbatches=4"),
        ("parallelism.data=3", "zero=1"),
    ],
)
def test_the_size_fits_and_the_next_does_not(layout: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*gpt(1), "data.kwargs.samples=4000", "memory_limit=4MB", *layout]
    found = planned([*words, "data.batch_size=max"], capsys)
    size, after = found["batch_size"], found["batch"]["next_size"]
    assert found["batch"]["size"] == size
    typed = planned([*words, f"data.batch_size={size}"], capsys)
    assert typed["fits"]
    assert max(typed["peak_memory_bytes"]) == found["batch"]["peak_memory_bytes"]
    larger = planned([*words, f"data.batch_size={after}"], capsys, status=3)
    assert max(larger["peak_memory_bytes"]) == found["batch"]["next_peak_memory_bytes"] > 4_000_000
    assert found["batch"]["plans"] <= 6


@pytest.mark.costly
def test_a_line_tells_the_size_what_the_next_lacks_and_that_learning_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *gpt(1), "data.kwargs.samples=4000", "memory_limit=4MB", "data.batch_size=max"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("data.batch_size=max: ")
    assert " would lack " in text
    assert " sizes were planned. Another batch size changes what is learned." in text


@pytest.mark.costly
def test_no_step_is_larger_than_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned([*gpt(1), "data.batch_size=max", "memory_limit=1GB", "schedule.microbatches=2"], capsys)
    assert found["batch"]["size"] == 64
    assert found["batch"]["next_size"] is None


@pytest.mark.full  # several searches: half a minute of processor time
def test_the_search_of_a_layout_finds_the_largest_batch_of_all_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*gpt(2), "data.kwargs.samples=400", "memory_limit=2MB", "parallelism=auto", "parallelism.ranks=2"]
    words += ["schedule.microbatches=2", "parallelism.search=quick"]
    found = planned([*words, "data.batch_size=max"], capsys)
    assert found["fits"]
    assert planned([*words, f"data.batch_size={found['batch']['size']}"], capsys)["fits"]
    planned([*words, f"data.batch_size={found['batch']['next_size']}"], capsys, status=3)


def test_where_not_even_one_sample_fits_the_line_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *gpt(1), "data.batch_size=max", "memory_limit=10kB"]) == 3
    assert "even 1 samples, one in each micro-batch, need" in capsys.readouterr().err


class Uneven(Dataset[Any]):
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(4 + index % 3, dtype=torch.long), torch.zeros(4 + index % 3, dtype=torch.long)


def uneven() -> Uneven:
    return Uneven()


def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    columns = zip(*samples, strict=True)
    return tuple(torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True) for column in columns)


def test_samples_that_differ_in_size_are_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    data = ["data=custom", "data.target=test_largest_batch:uneven", "data.collate=test_largest_batch:padded"]
    words = ["model=gpt", "model.kwargs.sequence_length=8", *data, "loss=cross_entropy", "hardware=a100_80gb"]
    assert main(["plan", *words, "data.batch_size=max"]) == 2
    line = capsys.readouterr().err
    assert "data.batch_size = max: belongs to data whose samples all have the same size" in line
    assert "memory depends on which come together" in line


def test_a_sweep_says_that_the_size_must_be_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *gpt(1), "data.batch_size=max", "-m"]) == 2
    assert "data.batch_size" in capsys.readouterr().err
