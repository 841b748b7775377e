"""ZeRO 0 to 3, with and without offload, on two ranks: the plain loop's numbers, to rounding.

Stages 0 and 1 reduce a step's gradients once, as the plain loop does; 2 and 3 reduce every micro-batch, so that their
sums have another order. What is offloaded changes no bit, as long as the optimizer's class is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import user_code
from covering import covering
from narrow import gradient
from user_project import plain_result
from zero_ranks import Result, train_all

from runner.launch.needs.zero import has_libaio
from runner.model.data import LossFunction

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16_master": torch.bfloat16}
TOLERANCE = {
    "fp32": 2e-6,
    "bf16": 4e-2,
    "bf16_master": 4e-2,
}  # the format's rounding, over four steps
PLACES: dict[str, tuple[str, ...]] = {
    "device": (),
    "optimizer_cpu": ("offload.optimizer=cpu",),
    "parameters_cpu": ("offload.parameters=cpu",),
    "both_cpu": ("offload.optimizer=cpu", "offload.parameters=cpu"),
    "optimizer_nvme": ("offload.optimizer=nvme", "offload.nvme_path=drive"),
}


class Masters:
    """AdamW over fp32 copies of 16-bit weights."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self.masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3, weight_decay=0.0)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = gradient(parameter).float()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


def overrides(
    stage: int, place: str, precision: str, count: int, samples: int = 21, clip: float | None = None
) -> list[str]:
    adam = ["optimizer=cpu_adam"] if has_16_bit_states_elsewhere(place, precision) else []
    made = [
        "parallelism.data=2", f"zero.stage={stage}", *PLACES[place], f"precision={precision}", *adam,
        f"schedule.microbatches={count}", f"data.kwargs.samples={samples}",
    ]  # fmt: skip
    return made if clip is None else [*made, f"trainer.grad_clip_norm={clip}"]


def expected(
    precision: str, count: int, samples: int = 21, clip: float | None = None, loss: LossFunction = user_code.mean
) -> tuple[list[float], dict[str, torch.Tensor]]:
    masters: dict[str, Any] = {"optimizer": Masters} if precision == "bf16_master" else {}
    return plain_result(
        loss=loss, samples=samples, replicas=2, by_replica=True, count=count, clip_norm=clip, dtype=DTYPES[precision],
        **masters,
    )  # fmt: skip


def assert_close(result: Result, losses: list[float], state: dict[str, torch.Tensor], precision: str) -> None:
    assert result.loss == pytest.approx(losses, rel=1e-6 if precision == "fp32" else 2e-2)
    assert result.weights.keys() == state.keys()
    for name, weight in state.items():
        torch.testing.assert_close(
            result.weights[name].float(), weight.float(), atol=TOLERANCE[precision], rtol=TOLERANCE[precision]
        )


def has_16_bit_states_elsewhere(place: str, precision: str) -> bool:
    return precision == "bf16" and place in ("optimizer_cpu", "both_cpu", "optimizer_nvme")


def is_there(stage: int, place: str) -> bool:
    return stage == 3 or place == "device" or (stage > 0 and place == "optimizer_cpu")


def is_allowed(stage: int, place: str, precision: str, count: int) -> bool:
    """Of those that need no operator compiled."""
    return is_there(stage, place) and not has_16_bit_states_elsewhere(place, precision)


FACTORS: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "place": [place for place in PLACES if place != "optimizer_nvme" or has_libaio()],
    "precision": list(DTYPES),
    "count": [1, 4],
}
CELLS = covering(FACTORS, strength=2, seed=146, allowed=is_allowed)
ALL = [case.values for case in CELLS]
SAMPLE = [case.values for case in CELLS if not case.marks]


def check(directory: Path, cells: Sequence[tuple[Any, ...]], seconds: int = 280) -> dict[str, Result]:
    results = train_all(directory, {"-".join(map(str, cell)): overrides(*cell) for cell in cells}, seconds=seconds)
    for cell in cells:
        result = results["-".join(map(str, cell))]
        assert_close(result, *expected(*cell[2:]), cell[2])
        assert result.record["status"] == "ok"
    return results


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_equals_the_plain_loop(tmp_path: Path) -> None:
    check(tmp_path, SAMPLE, seconds=600)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_equal_the_plain_loop(tmp_path: Path, stage: int) -> None:
    check(tmp_path, [cell for cell in ALL if cell[0] == stage], seconds=1700)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_16_bit_states_in_the_host_or_on_a_drive_equal_the_plain_loop(tmp_path: Path) -> None:
    """DeepSpeed's own optimizer holds them there; the plain loop's is torch's, to the format's rounding."""
    cells = [
        (stage, place, "bf16", count)
        for stage in FACTORS["stage"]
        for place in FACTORS["place"]
        for count in FACTORS["count"]
        if is_there(stage, place) and has_16_bit_states_elsewhere(place, "bf16")
    ]
    found = check(tmp_path, cells, seconds=1700)
    for stage, place, _, count in cells:
        told = found[f"{stage}-{place}-bf16-{count}"].record["state_bytes"]
        if stage == 3 and place != "optimizer_nvme":  # a host that is the device itself: both kinds of memory together
            predicted, measured = (sum(told[key][0].values()) for key in ("predicted", "measured"))
            assert measured == predicted


@pytest.mark.slow
def test_stage_0_and_1_are_the_plain_loop_bit_by_bit_and_offload_changes_no_bit(tmp_path: Path) -> None:
    """Clipped, uneven batches, with micro-batches that some or all replicas have no sample for."""
    runs = {
        "zero_0": overrides(0, "device", "fp32", 4, samples=17, clip=0.05),
        "zero_1": overrides(1, "device", "fp32", 4, samples=17),
        "zero_2": overrides(2, "device", "fp32", 4, samples=17, clip=0.05),
        "zero_2_cpu": overrides(2, "optimizer_cpu", "fp32", 4, samples=17, clip=0.05),
        "zero_3": overrides(3, "device", "fp32", 4, samples=17),
        "zero_3_cpu": overrides(3, "both_cpu", "fp32", 4, samples=17),
        "counted": [*overrides(2, "device", "fp32", 2), "loss.target=user_code:counted"],
    }
    found = train_all(tmp_path, runs)
    clipped, plain = expected("fp32", 4, 17, 0.05), expected("fp32", 4, 17)
    assert found["zero_0"].loss == clipped[0]
    assert all(torch.equal(found["zero_0"].weights[name], clipped[1][name]) for name in clipped[1])
    assert_close(found["zero_1"], *plain, "fp32")
    assert_close(found["zero_2"], *clipped, "fp32")
    assert_close(found["zero_3"], *plain, "fp32")
    for name in ("zero_2", "zero_3"):
        own, offloaded = found[name], found[f"{name}_cpu"]
        assert own.loss == offloaded.loss
        assert all(torch.equal(own.weights[key], offloaded.weights[key]) for key in own.weights)
    assert_close(found["counted"], *expected("fp32", 2, loss=user_code.counted), "fp32")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)  # on a fresh machine DeepSpeed's async_io is compiled first
@pytest.mark.skipif(not has_libaio(), reason="offload to a drive needs libaio-dev")
def test_states_on_a_drive_change_no_bit(tmp_path: Path) -> None:
    common = overrides(3, "device", "fp32", 2)
    drive = ("offload.optimizer=nvme", f"offload.nvme_path={tmp_path / 'drive'}")
    runs = {
        "device": common,
        "optimizer": [*common, *drive],
        "both": [*common, *drive, "offload.parameters=nvme"],
        "parameters": [*common, "offload.parameters=nvme", drive[1]],
    }
    found = train_all(tmp_path, runs)
    for name in ("optimizer", "both", "parameters"):
        assert found[name].loss == found["device"].loss
        assert all(torch.equal(found[name].weights[key], value) for key, value in found["device"].weights.items())
