"""A part of offloaded states stays on the device: the plain loop's numbers, the asked part, and resuming."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zero_model
from user_project import plain_result
from zero_ranks import train_all

from runner.config.compose.resolve import resolve
from runner.config.deepspeed import deepspeed_settings
from runner.strategy.zero.twin_flow import TwinFlow, device_weights

RATIO = 0.499  # of the model's 12 equal layers and two small ones, the first and six more stay
WIDE = ("model.target=zero_model:model", "parallelism.data=2", "schedule.microbatches=2", "lr_scheduler=linear")
TWIN = ("zero.stage=3", "optimizer=cpu_adam", f"offload.ratio={RATIO}")


@pytest.mark.parametrize(
    ("sizes", "ratio", "stays"),
    [([1] * 10, 0.3, 7), ([1] * 10, 0.9, 1), ([8, 1, 1], 0.3, 0), ([1, 1, 8], 0.3, 2), ([4], 0.01, 0)],
)
def test_elements_are_counted_and_deepspeed_comes_to_the_same_number(
    sizes: list[int], ratio: float, stays: int
) -> None:
    assert device_weights(sizes, ratio) == stays
    told = TwinFlow(sizes, ratio).ratio_of_groups
    assert int((1 - told) * len(sizes)) == stays  # as in stage3.py
    assert 0 < told <= 1


def test_every_weight_is_a_sub_group() -> None:
    made = deepspeed_settings(resolve(["model=mlp", *TWIN]), accelerated=False)["zero_optimization"]
    assert made["sub_group_size"] == 1
    assert made["offload_optimizer"]["ratio"] == RATIO


def test_both_sides_share_states_and_settings_and_keep_their_own_counters() -> None:
    flats = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    host, device = (torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=lr) for lr in (0.1, 0.2))
    places = dict.fromkeys(range(3), "cpu")
    outer = SimpleNamespace(
        optimizer=host, backup_optimizer=device, subgroup_to_device=places, fp32_partitioned_groups_flat=flats
    )
    twin = TwinFlow([2, 2, 2], 0.5)
    twin.attach(outer)
    host.param_groups[0]["lr"] = 0.05
    twin.follow()
    assert device.param_groups[0]["lr"] == 0.05
    assert [place == "cpu" for place in places.values()] == [False, True, True]
    host.state.update({flat: {"step": 3} for flat in flats})
    twin.restore_counters()
    assert [isinstance(device.state[flat]["step"], torch.Tensor) for flat in flats] == [True, False, False]


class Falling:
    """AdamW whose learning rate falls to zero in four steps."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer, self.steps = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0), 0

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-3 * (1 - self.steps / 4)
        self.optimizer.step()
        self.steps += 1


@pytest.mark.full  # DeepSpeed's operator is compiled for it
def test_it_equals_the_plain_loop_and_holds_the_asked_part(tmp_path: Path) -> None:
    kept = ("checkpoint.every=2", "checkpoint.keep=2")
    runs = {
        "twin": (*WIDE, *kept, *TWIN),
        "resumed": (*WIDE, *TWIN, f"resume={tmp_path / 'twin' / 'checkpoints' / 'step-2.ckpt'}"),
        "elsewhere": (*WIDE, "zero.stage=1", f"resume={tmp_path / 'twin' / 'checkpoints' / 'step-2.ckpt'}"),
        "weights_too": (*WIDE, *TWIN, "offload.parameters=cpu", "precision=bf16_master"),
    }
    found = train_all(tmp_path, runs, seconds=800)
    losses, state = plain_result(zero_model.model, replicas=2, count=2, by_replica=True, optimizer=Falling)
    for name in ("twin", "resumed", "elsewhere"):
        assert found[name].loss == pytest.approx(losses, rel=1e-5), name
        for key, weight in state.items():
            torch.testing.assert_close(found[name].weights[key], weight, atol=1e-5, rtol=0, msg=f"{name}: {key}")
    assert found["weights_too"].loss == pytest.approx(losses, rel=2e-2)
    for name in ("twin", "weights_too"):
        told = found[name].record["state_bytes"]
        for predicted, measured in zip(told["predicted"], told["measured"], strict=True):
            assert measured == pytest.approx(predicted, rel=2e-3), name
            assert measured["optimizer"] > 0
