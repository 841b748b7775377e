"""Optimizers on two ranks, with and without ZeRO: the plain loop's numbers, the predicted bytes, and resuming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import user_code
import zero_model
from narrow import present
from reference import accumulate, microbatches
from torch import Tensor, nn
from user_project import plain_batches, plain_result
from zero_ranks import Result, train_all

WIDE = ("model.target=zero_model:model", "parallelism.data=2", "schedule.microbatches=2", "optimizer.betas=[0.9,0.98]")
ONEBIT = ("optimizer=onebit_adam", "optimizer.freeze_step=2", "optimizer.eps=1e-3")
KEPT = ("checkpoint.every=2", "checkpoint.keep=2")
BETAS, EPS, LR, FREEZE = (0.9, 0.98), 1e-3, 1e-3, 2


def parts_of_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[list[Tensor], float]:
    """Of each replica: its gradients, as parts of the mean over all samples."""
    inputs, targets = (microbatches(each, 2, 2) for each in batch)
    found = [
        accumulate(model, user_code.mean, list(zip(inputs[2 * r : 2 * r + 2], targets[2 * r : 2 * r + 2], strict=True)),
                   torch.float32)
        for r in range(2)
    ]  # fmt: skip
    weight = sum(part[1] for part in found)
    flat = [torch.cat([present(gradient).flatten() for gradient in part[2]]) / weight for part in found]
    return flat, sum(part[0] for part in found) / weight


class PlainOneBit:
    """Two replicas' 1-bit Adam over one flat vector, whose chunks are its halves; scales are of 1024 elements."""

    def __init__(self, sizes: list[int]) -> None:
        total = sum(sizes)
        self.half = -(-total // 16) * 8
        self.m, self.v = torch.zeros(total), torch.zeros(total)
        self.worker, self.server = [torch.zeros(total), torch.zeros(total)], torch.zeros(total)
        ends = torch.tensor([0, *sizes, 0]).cumsum(0).tolist()[:-1]
        parts = sorted({*ends, self.half})
        self.cuts = sorted({*parts, *(at for a, b in zip(parts, parts[1:], strict=False) for at in range(a, b, 1024))})

    def signs(self, z: Tensor) -> Tensor:
        made = torch.zeros_like(z)
        for a, b in zip(self.cuts, self.cuts[1:], strict=False):
            counted = (self.v[a:b] > 0).sum().clamp(min=1)
            made[a:b] = torch.where(z[a:b] >= 0, 1.0, -1.0) * (z[a:b].abs().sum() / counted)
        return made * (self.v > 0)

    def update(self, parts: list[Tensor], step: int) -> Tensor:
        beta1, beta2 = BETAS
        if step < FREEZE:
            mean = parts[0] + parts[1]
            self.m = beta1 * self.m + (1 - beta1) * mean
            self.v = beta2 * self.v + (1 - beta2) * mean * mean
        else:
            told = []
            for replica, part in enumerate(parts):
                z = (beta1 * self.m + (1 - beta1) * 2 * part + self.worker[replica]) * (self.v > 0)
                told.append(self.signs(z))
                self.worker[replica] = z - told[-1]
            z = (told[0] + told[1]) / 2 + self.server
            self.m = self.signs(z)
            self.server = z - self.m
        return LR * self.m / (self.v.sqrt() + EPS)


ZERO_ONE = ("optimizer=onebit_adam_refreshed", "optimizer.freeze_step=4", "optimizer.variance_refreshes=1", ONEBIT[-1])
LAMB = ("optimizer=onebit_lamb", "optimizer.freeze_step=10", ONEBIT[-1], "trainer.max_steps=14")


def plain_onebit() -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = zero_model.model()
    parameters = list(model.parameters())
    plain = PlainOneBit([p.numel() for p in parameters])
    losses: list[float] = []
    for step, batch in enumerate(plain_batches()):
        parts, loss = parts_of_step(model, batch)
        change = plain.update(parts, step)
        with torch.no_grad():
            for p, one in zip(parameters, torch.split(change, [p.numel() for p in parameters]), strict=True):
                p.sub_(one.view_as(p))
        losses.append(loss)
    return losses, model.state_dict()


def adam8bit(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    from bitsandbytes.optim.adamw import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(parameters, lr=LR, betas=BETAS, weight_decay=0.0)  # type: ignore[no-untyped-call]  # the library's
    return made


def assert_close(result: Result, losses: list[float], state: dict[str, Tensor], most: float) -> None:
    assert result.loss == pytest.approx(losses, rel=1e-5)
    assert max(float((result.weights[name] - state[name]).abs().max()) for name in state) < most


def assert_states_as_predicted(result: Result) -> None:
    told = result.record["state_bytes"]
    for predicted, measured in zip(told["predicted"], told["measured"], strict=True):
        for part in predicted:
            assert measured[part] == pytest.approx(predicted[part], rel=2e-3), (part, told)


@pytest.mark.full
def test_kinds_of_few_bits_go_on_bit_by_bit_and_their_bytes_are_counted(tmp_path: Path) -> None:
    """0/1 Adam compresses one step of four: the third. LAMB is cut after its twelfth, the second of compressed ones."""
    cut = f"resume={tmp_path / 'lamb' / 'checkpoints' / 'step-12.ckpt'}"
    few_bits: dict[str, Any] = {"four": ("optimizer=adam4bit",), "fp8": ("optimizer=adam_fp8", "precision=bf16")}
    runs = with_resumed(tmp_path, {"zero_one": ZERO_ONE, **few_bits})
    runs |= {"lamb": [*WIDE, *KEPT, "checkpoint.every=12", *LAMB], "lamb_resumed": [*WIDE, *LAMB, cut]}
    found = train_all(tmp_path, runs)
    for name in few_bits:
        assert_states_as_predicted(found[name])
        assert_goes_on(found, name)
    for name, compressed, steps in (("zero_one", 1, 4), ("lamb", 4, 14)):
        assert_states_as_predicted(found[name])
        assert_goes_on(found, name)
        sent, whole = (found[name].record[key] for key in ("bytes_moved", "state_bytes"))
        gradients = 2 * whole["measured"][0]["gradients"]  # a step's all-reduce of two ranks
        assert sent["weight_gradients"] == pytest.approx(gradients * (steps - compressed) / steps, rel=1e-3)
        assert 0 < sent["optimizer_states"] < gradients * compressed / steps / 2 / 15


def assert_goes_on(found: Mapping[str, Result], name: str) -> None:
    whole, resumed = found[name], found[f"{name}_resumed"]
    assert whole.loss == resumed.loss
    assert [key for key in whole.weights if not torch.equal(whole.weights[key], resumed.weights[key])] == []


def with_resumed(directory: Path, runs: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Each run, and after it the same from its checkpoint of step 2 on."""
    return {
        key: value
        for name, overrides in runs.items()
        for key, value in (
            (name, [*WIDE, *KEPT, *overrides]),
            (f"{name}_resumed", [*WIDE, *overrides, f"resume={directory / name / 'checkpoints' / 'step-2.ckpt'}"]),
        )
    }


@pytest.mark.full
def test_they_equal_the_plain_loop_and_go_on_bit_by_bit(tmp_path: Path) -> None:
    runs = {
        "onebit": ONEBIT,
        "onebit_zero": (*ONEBIT, "zero.stage=0"),
        "blocks": ("optimizer=adam8bit",),
        "blocks_1": ("optimizer=adam8bit", "zero.stage=1"),
        "blocks_2": ("optimizer=adam8bit", "zero.stage=2"),
        "blocks_3": ("optimizer=adam8bit", "zero.stage=3"),
    }
    found = train_all(tmp_path, with_resumed(tmp_path, runs))
    for name in runs:
        assert_states_as_predicted(found[name])
        assert_goes_on(found, name)
    for name in ("onebit", "onebit_zero"):
        assert_close(found[name], *plain_onebit(), most=1e-5)
        sent = found[name].record["bytes_moved"]
        half = found[name].record["state_bytes"]["measured"][0]["gradients"]  # a step's all-reduce of one rank of two
        # In two of four steps; in the others two ranks tell each other at most whether their gradients are finite.
        assert sent["weight_gradients"] == pytest.approx(half, abs=4)
        assert 0 < sent["optimizer_states"] < half / 2 / 15
    plain = plain_result(zero_model.model, replicas=2, count=2, by_replica=True, optimizer=adam8bit)
    assert_close(found["blocks"], *plain, most=1e-6)
    for name in ("blocks_1", "blocks_2", "blocks_3"):
        assert_close(found[name], *plain, most=3e-4)  # one block may lie on both ranks, with a scale on each
        apart = [(found[name].weights[key] - plain[1][key]).abs() > 1e-6 for key in plain[1]]
        assert sum(int(one.sum()) for one in apart) <= 256, "blocks of other elements"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_deepspeeds_adam_equals_the_plain_loop_and_goes_on_to_rounding(tmp_path: Path) -> None:
    runs = {f"fused_{stage}": ("optimizer=fused_adam", f"zero.stage={stage}") for stage in (0, 1, 2, 3)}
    runs |= {f"host_{stage}": ("optimizer=cpu_adam", f"zero.stage={stage}") for stage in (2, 3)}
    found = train_all(tmp_path, with_resumed(tmp_path, runs))

    def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, weight_decay=0.0)

    plain = plain_result(zero_model.model, replicas=2, count=2, by_replica=True, optimizer=adamw)
    for name in runs:
        assert_states_as_predicted(found[name])
        assert_close(found[name], *plain, most=1e-5)
        # The operator multiplies its bias correction up step by step, and takes a power where it starts: not one bit.
        assert_close(found[f"{name}_resumed"], found[name].loss, found[name].weights, most=1e-6)
