"""Lightning's Trainer around the engine: the plain loop's numbers, and Lightning's own features at work."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import user_code
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_runs import Losses, fit, weights_of
from narrow import gradient, present
from reference import accumulate, clip, microbatches, train
from torch import nn

from runner.engine.window import StepBatch
from runner.training.averaging import WeightAveraging

PEAK = 2.0**-7  # a power of two: the schedule's factors are then exact
WARMUP, STEPS = 2, 7
SCHEDULE = ("lr_scheduler=linear", f"lr_scheduler.warmup_steps={WARMUP}", f"optimizer.lr={PEAK}")


def expected_rate(step: int) -> float:
    return PEAK * ((step + 1) / WARMUP if step < WARMUP else (STEPS - step) / (STEPS - WARMUP))


class ScheduledAdamW:
    """An optimizer whose rate follows the schedule, by hand."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=PEAK, weight_decay=0.1)
        self.number = 0

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] = expected_rate(self.number)
        self.optimizer.step()
        self.number += 1


def plain_batches(steps: int, samples: int = 24, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, targets = user_code.points(samples)[0].tensors
    order = [range(start, min(start + size, samples)) for start in range(0, samples, size)]
    return [(inputs[list(part)], targets[list(part)]) for part in (order * steps)[:steps]]


def plain_model(**kwargs: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return user_code.model(**kwargs)


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(("precision", "clip_norm", "count"), [("fp32", None, 1), ("fp32", 0.05, 3), ("bf16", 0.05, 3)])
def test_losses_and_weights_are_the_plain_loops(precision: str, clip_norm: float | None, count: int) -> None:
    samples = 21  # the last step of an epoch is short
    overrides = (*SCHEDULE, "optimizer.weight_decay=0.1", f"schedule.microbatches={count}", f"precision={precision}")
    clipping = () if clip_norm is None else (f"trainer.grad_clip_norm={clip_norm}",)
    trainer, _, losses = fit(*overrides, *clipping, f"trainer.max_steps={STEPS}", f"+data.kwargs.samples={samples}")
    model = plain_model()
    expected = train(
        model,
        user_code.mean,
        plain_batches(STEPS, samples),
        count=count,
        clip_norm=clip_norm,
        optimizer=ScheduledAdamW,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision],
    )
    assert losses == expected
    assert trainer.global_step == STEPS
    assert_same_weights(weights_of(trainer), model.state_dict())


def test_a_users_callback_sees_the_steps_loss() -> None:
    seen = Losses()
    _, _, losses = fit("trainer.max_steps=4", callbacks=[seen])
    assert seen.seen == pytest.approx(losses, rel=1e-6)
    assert seen.steps == [1, 2, 3, 4]


def test_before_the_update_gradients_are_final() -> None:
    class Gradients(Callback):
        def on_before_optimizer_step(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
        ) -> None:
            self.found = [gradient(p).clone() for p in pl_module.parameters()]

    callback = Gradients()
    fit(
        "trainer.max_steps=1", "trainer.grad_clip_norm=0.05", "schedule.microbatches=4",
        callbacks=[callback],
    )  # fmt: skip
    model = plain_model()
    inputs, targets = plain_batches(1)[0]
    pairs = list(zip(microbatches(inputs, 1, 4), microbatches(targets, 1, 4), strict=True))
    _, weight, _ = accumulate(model, user_code.mean, pairs, torch.float32)
    parameters = list(model.parameters())
    for parameter in parameters:
        gradient(parameter).div_(weight)
    clip(parameters, 0.05)
    assert all(torch.equal(found, gradient(p)) for found, p in zip(callback.found, parameters, strict=True))


def test_gradients_that_others_clear_are_claimed_again() -> None:
    class Clears(Callback):
        def on_train_batch_start(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: StepBatch, batch_idx: int
        ) -> None:
            pl_module.zero_grad(set_to_none=True)

    assert fit("trainer.max_steps=4", callbacks=[Clears()])[2] == fit("trainer.max_steps=4")[2]
    assert len(set(fit("trainer.max_steps=4", "+data.kwargs.samples=8")[2])) == 4, "the same samples give other losses"


def test_a_checkpoint_continues_the_run(tmp_path: Path) -> None:
    """Dropout too: it follows the step's number."""
    overrides = (*SCHEDULE, "+model.kwargs.dropout=0.5", "schedule.microbatches=2", "lr_scheduler.total_steps=7")
    whole_trainer, _, whole = fit(*overrides, "trainer.max_steps=6")
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(*overrides, "trainer.max_steps=3", callbacks=[saver])
    file = tmp_path / "step=3.ckpt"
    trainer, _, rest = fit(*overrides, "trainer.max_steps=6", ckpt_path=file)
    assert rest == whole[3:]
    assert trainer.global_step == 6
    assert_same_weights(weights_of(trainer), weights_of(whole_trainer))
    saved = torch.load(file, weights_only=False)
    user_code.model().load_state_dict(saved["state_dict"], strict=True)


class Weights(Callback):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.found.append({name: value.clone() for name, value in weights_of(trainer).items()})


def test_averages_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    saver, seen = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}"), Weights()
    fit("trainer.max_steps=3", callbacks=[WeightAveraging(0.75), seen, saver])
    averaging = WeightAveraging(0.75)
    trainer, _, _ = fit("trainer.max_steps=5", callbacks=[averaging, seen], ckpt_path=tmp_path / "step=3.ckpt")
    assert len(seen.found) == 5
    expected = {name: value.detach().clone() for name, value in plain_model().state_dict().items()}
    for weights in seen.found:
        expected = {name: 0.75 * value + 0.25 * weights[name] for name, value in expected.items()}
    torch.testing.assert_close(averaging.whole(trainer.strategy), expected)


def test_the_best_checkpoint_is_chosen_by_val_loss(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=1)
    _, module, _ = fit("trainer.max_steps=6", callbacks=[saver], limit_val_batches=1.0, val_check_interval=2)
    assert float(present(saver.best_model_score)) == pytest.approx(min(value for _, value in module.val_losses))


def test_validation_is_the_plain_mean_over_its_samples() -> None:
    trainer, module, _ = fit(
        "trainer.max_steps=4", "schedule.microbatches=3", limit_val_batches=1.0, val_check_interval=2
    )
    assert [step for step, _ in module.val_losses] == [2, 4]
    model = plain_model()
    model.load_state_dict(weights_of(trainer))
    inputs, targets = user_code.points()[1].tensors
    with torch.no_grad():
        expected = user_code.mean(model.eval()(inputs), targets).item()
    assert module.val_losses[-1][1] == pytest.approx(expected, rel=1e-6)


def test_early_stopping_on_val_loss() -> None:
    stopper = EarlyStopping("val_loss", patience=0, min_delta=100.0)
    trainer, module, _ = fit("trainer.max_steps=20", callbacks=[stopper], limit_val_batches=1.0, val_check_interval=2)
    assert trainer.global_step == 4
    assert [step for step, _ in module.val_losses] == [2, 4]


def test_the_learning_rate_is_logged_as_it_was_used(tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path), name="", version="csv")
    monitor = LearningRateMonitor(logging_interval="step")
    fit(*SCHEDULE, f"trainer.max_steps={STEPS}", callbacks=[monitor], logger=logger)
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = [float(row["lr-AdamW"]) for row in csv.DictReader(file) if row["lr-AdamW"]]
    assert rows == [expected_rate(step) for step in range(STEPS)]
