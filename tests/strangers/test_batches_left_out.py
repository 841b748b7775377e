"""Code of users that would leave batches out of a training, or change them, where nothing reads it is refused."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from runner.api import PipelineStrategy
from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.model.data import load_datasets
from runner.model.lightning_module import lightning_problems

HERE = "test_batches_left_out"


class Accumulates(pl.LightningModule):
    """Makes a step of every second batch alone."""

    def layers(self) -> Any:
        return [lambda: nn.Linear(4, 4)]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def rows() -> TensorDataset:
    made = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(made, made.tanh())


class Augments(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].flip(1), batch[1]


class Counts(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3}


class Prepares(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=4, num_workers=1, worker_init_fn=print)


class Template(pl.LightningDataModule):
    """Nothing is kept, and there is no worker."""

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=4, worker_init_fn=print)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("steps", [4, 1])
def test_a_step_that_leaves_a_batch_out_ends_the_run(steps: int) -> None:
    trainer = pl.Trainer(strategy=PipelineStrategy(stages=1, microbatches=1), accelerator="cpu", logger=False,
                         limit_train_batches=steps, max_epochs=1, enable_checkpointing=False)  # fmt: skip
    with pytest.raises(RequestError, match=r"must have Accumulates.optimizer_step call optimizer.step") as raised:
        trainer.fit(Accumulates(), DataLoader(rows(), batch_size=4))
    assert "would be lost without it" in str(raised.value)


def test_what_would_do_nothing_is_taken() -> None:
    config = resolve([f"data.target={HERE}:Template", "data.batch_size=4", "model=mlp"])
    assert len(load_datasets(config.data, config.seed).train) == 32


class Listing(pl.LightningModule):
    """Its layers are made when they are built."""

    def setup(self, stage: str) -> None:
        self.began = True

    def layers(self) -> list[Any]:
        return [lambda: nn.Linear(4, 4)]


class Late(pl.LightningModule):
    def setup(self, stage: str) -> None:
        self.net = nn.Linear(4, 4)


def test_layers_that_are_made_in_the_run_are_refused() -> None:
    (problem,) = lightning_problems(Late(), resolve([f"model.target={HERE}:Late"]))
    assert problem.rule == "must make its layers in Late.__init__, and has none"
    assert [*lightning_problems(Listing(), resolve([f"model.target={HERE}:Listing"]))] == []


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        ("Augments", "must not define on_after_batch_transfer"),
        ("Counts", "must have no state_dict of its own"),
        ("Prepares", "must leave worker_init_fn out"),
    ],
)
def test_what_is_not_called_of_a_datamodule_is_refused(module: str, rule: str) -> None:
    config = resolve([f"data.target={HERE}:{module}", "data.batch_size=4", "model=mlp"])
    with pytest.raises(RequestError, match=rule):
        load_datasets(config.data, config.seed)
