"""How divided logits reach the loss, how parts are summed and how ranks are numbered change no result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_kernels import plain, run, weights_of
from whole_runs import Run

from runner.engine.transport.tensor_group import TensorGroup
from runner.errors import RequestError

_PARTS = ("parallelism.tensor=2", "loss.target=runner.zoo.losses:cross_entropy")
_SHARDING = "parallelism.sharding={head:'column_gathered',*.gate:'column',*.up:'column',*.down:'row'}"


def equal(made: Run, folder: Path, start: dict[str, torch.Tensor]) -> None:
    losses, weights = plain(start)
    torch.testing.assert_close(torch.tensor(made.losses), torch.tensor(losses), rtol=2e-6, atol=2e-6)
    for name, value in weights_of(folder).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=3e-5, msg=name)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("start")
    run(folder, "optimizer.lr=1e-30", "optimizer.weight_decay=0", "trainer.max_steps=1")
    return weights_of(folder)


@pytest.mark.costly
def test_logits_are_put_together_only_if_asked(start: dict[str, torch.Tensor], tmp_path: Path) -> None:
    parts = (*_PARTS, _SHARDING)
    sent, divided = {}, {}
    for how in ("vocabulary", "gathered", "auto"):
        made = run(tmp_path / how, *parts, f"parallelism.loss={how}")
        equal(made, tmp_path / how, start)
        sent[how], divided[how] = made.plan.tensor_bytes_sent, made.plan.profile.divided_logits
    assert (divided["vocabulary"], divided["gathered"]) == ("head", "")
    assert divided["auto"] == "head"
    assert sent["auto"] == sent["vocabulary"] != sent["gathered"]


@pytest.mark.costly
def test_what_the_loss_cannot_take_by_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="parallelism.loss = vocabulary: needs a plain cross-entropy"):
        run(tmp_path, "parallelism.tensor=2", "parallelism.loss=vocabulary")


@pytest.mark.costly
@pytest.mark.parametrize(
    "layout",
    [
        ("parallelism.tensor=2", "parallelism.tensor_sums=ordered", "parallelism.sequence=true"),
        ("parallelism.tensor=4", "parallelism.tensor_sums=native"),
        ("parallelism.pipeline=2", "parallelism.data=2", "parallelism.order=pipeline_inside", "checkpoint=every"),
        (
            "parallelism.pipeline=2", "parallelism.data=2", "parallelism.tensor=2", "schedule=chimera",
            "schedule.microbatches=2", "parallelism.order=pipeline_inside",
        ),
    ],
)  # fmt: skip
def test_sums_and_numbers_of_ranks(layout: tuple[str, ...], start: dict[str, torch.Tensor], tmp_path: Path) -> None:
    equal(run(tmp_path, *layout), tmp_path, start)


class _Transport:
    """Of the first of three ranks. Its own sum is told from one in the order of the ranks."""

    rank, device = 0, torch.device("cpu")

    def all_reduce(self, value: torch.Tensor, ranks: Any) -> Any:
        value.fill_(-1.0)
        return self

    def aside(self) -> Any:
        return torch.no_grad()

    def wait(self) -> Any:
        return [torch.zeros(2), torch.zeros(2), torch.zeros(2)]

    def receive(self, value: torch.Tensor, *_: Any) -> Any:
        value.fill_(1.0)
        return self

    def send(self, *_: Any) -> Any:
        return self

    def start_all_gather(self, value: torch.Tensor, ranks: Any) -> Any:
        self.wait = lambda: [value] * len(ranks)  # type: ignore[method-assign]
        return self


@pytest.mark.parametrize(("sums", "ranks", "native"), [
    ("auto", 2, True), ("auto", 3, False), ("native", 3, True), ("ordered", 2, False), ("ordered", 3, False),
])  # fmt: skip
def test_the_library_sums_where_it_is_asked_to(sums: str, ranks: int, native: bool) -> None:
    transport: Any = _Transport()
    made = TensorGroup(transport, range(ranks), sums).all_reduce(torch.full((6,), 2.0))
    assert made.tolist() == [-1.0 if native else 2.0 + ranks - 1] * 6
