"""Real runs under ZeRO 0 to 3, all from one process: the plain loop's numbers, the predicted bytes, and resuming.

Stages 0 and 1 reduce a step's gradients once, as the plain loop does; 2 and 3 reduce every micro-batch, so that their
sums have another order. What is offloaded changes no bit, as long as the optimizer's class is the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import user_code
import zero_model
from narrow import gradient, present
from plain_onebit import plain_onebit
from test_delayed_update import Explicitly
from user_project import STEPS, plain_result
from zero_ranks import Result, train_groups

from runner.config.compose.resolve import resolve
from runner.launch.needs.zero import has_libaio
from runner.optim.catalogue.registry import OPTIMIZERS
from runner.plan.memory.zero import sharing_of
from runner.plan.stages.figures import stage_figures
from runner.profiling.model import profile_model

CPU, BOTH = ("offload.optimizer=cpu",), ("offload.optimizer=cpu", "offload.parameters=cpu")
DATA = ("parallelism.data=2",)
UNEVEN = (*DATA, "schedule.microbatches=4", "data.kwargs.samples=17")  # some replicas have no sample for some of them
CLIPPED = (*UNEVEN, "trainer.grad_clip_norm=0.05")
EXACT = {
    "zero_0": (*CLIPPED, "zero.stage=0"),
    "zero_1": (*UNEVEN, "zero.stage=1"),
    "zero_2": (*CLIPPED, "zero.stage=2"),
    "zero_2_cpu": (*CLIPPED, "zero.stage=2", *CPU),
    "zero_3": (*UNEVEN, "zero.stage=3"),
    "zero_3_cpu": (*UNEVEN, "zero.stage=3", *BOTH),
}
DRIVE = {"zero_3_drive": (*UNEVEN, "zero.stage=3", "offload.optimizer=nvme", "offload.nvme_path=drive")}
NARROW = {
    "bf16_1": (*UNEVEN, "zero.stage=1", "precision=bf16"),
    "bf16_3": (*UNEVEN, "zero.stage=3", "precision=bf16_master"),
}
DELAYED = (*DATA, *CPU, "offload.delay_from=1", "data.kwargs.samples=24")
LATE = {
    "delayed_1": (*DELAYED, "zero.stage=1"),
    "delayed_1_begun": (*DELAYED, "zero.stage=1", "trainer.max_steps=2"),
    "delayed_1_resumed": (*DELAYED, "zero.stage=1", "resume={delayed_1_begun}"),
}
WIDE = ("model.target=zero_model:model", *DATA)
TWICE = (*WIDE, "schedule.microbatches=2")
BYTES = {
    "bytes_1_adam": (*TWICE, "zero.stage=1"),
    "bytes_2_cpu_master": (*TWICE, "zero.stage=2", "precision=bf16_master", *CPU),
    "bytes_3_both_cpu": (*TWICE, "zero.stage=3", "precision=bf16_master", *BOTH),
}
PEAKS = {
    "several": (*TWICE, "zero.stage=2", "optimizer=sgd"),
    "offloaded": (*TWICE, "zero.stage=2", *CPU),
    "averaged": (*TWICE, "zero.stage=2", "trainer.ema_decay=0.9"),
    "unsharded_in_turn": (*WIDE, "zero.stage=1", "zero.bucket_elements=300"),
}
FEW_BITS = (*TWICE, "optimizer.betas=[0.9,0.98]", "checkpoint.every=2", "checkpoint.keep=2")
ONEBIT = (*FEW_BITS, "optimizer=onebit_adam", "optimizer.freeze_step=2", "optimizer.eps=1e-3", "zero.stage=0")
OPTIMIZED = {
    "onebit": ONEBIT,
    "onebit_resumed": (*ONEBIT, "resume={onebit}"),
    "blocks": (*FEW_BITS, "optimizer=adam8bit", "zero.stage=2"),
    "blocks_resumed": (*FEW_BITS, "optimizer=adam8bit", "zero.stage=2", "resume={blocks}"),
}
COUNTED = {"counted": (*DATA, "schedule.microbatches=2", "zero.stage=2", "loss.target=user_code:counted")}
EARLY = (*DATA, "zero.stage=3", "model.target=zero_model:placed", "trainer.val_every=1")
PLACED = {"placed": EARLY, "placed_in_time": (*EARLY, "zero.config={settings}")}
STEP = (
    *DATA,
    "model.target=zero_model:Stepping",
    "loss=auto",
    "loss.target=runner.zoo.losses:cross_entropy",
    "data.kwargs.samples=24",
    "zero.stage=2",
)
OWN_STEP = {"step_2": STEP, "step_2_cpu": (*STEP, *CPU)}
TWO = {
    **PLACED,
    **OWN_STEP,
    **EXACT,
    **(DRIVE if has_libaio() else {}),
    **NARROW,
    **LATE,
    **BYTES,
    **PEAKS,
    **OPTIMIZED,
    **COUNTED,
}

GRID = (*CLIPPED, "parallelism.pipeline=2", "partition=manual", "partition.boundaries=[4]")  # one cut for all: of sizes
FROZEN = (*GRID, "trainer.freeze=[0.*]")
FOUR = {
    "bytes_grid": GRID,
    "bytes_grid_1": (*GRID, "zero.stage=1"),
    "grid_2_cpu": (*GRID, "zero.stage=2", *CPU),
    "bytes_grid_own": (*GRID, "zero.stage=1", "schedule=zb_h1"),  # shared out by the runner itself
    "frozen": FROZEN,
    "frozen_own": (*FROZEN, "zero.stage=1", "schedule=zb_h1"),
    "pipe": (*TWICE, "zero.stage=2", "optimizer=sgd", "parallelism.pipeline=2"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """All runs; those that go on do it from another run's second step."""
    place = tmp_path_factory.mktemp("zero")
    saved = {name: place / name / "checkpoints" / "step-2.ckpt" for name in (*TWO, *FOUR)}
    saved["settings"] = place / "settings.json"
    saved["settings"].write_text('{"zero_optimization": {"stage3_prefetch_bucket_size": 0}}')
    groups = [
        (
            ranks,
            {name: [word.format(**saved) if "{" in word else word for word in words] for name, words in runs.items()},
        )
        for ranks, runs in ((2, TWO), (4, FOUR))
    ]
    return train_groups(place, groups, seconds=800)


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


def expected(clip: float | None = None, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    made: dict[str, Any] = {"samples": 17, "replicas": 2, "by_replica": True, "count": 4, "clip_norm": clip}
    return plain_result(**{**made, **options})


def assert_close(result: Result, plain: tuple[list[float], dict[str, torch.Tensor]], rounding: float = 2e-6) -> None:
    losses, state = plain
    name = result.run_dir.name
    assert result.record["status"] == "ok"
    assert result.loss == pytest.approx(losses, rel=rounding), name
    assert result.weights.keys() == state.keys()
    for key, weight in state.items():
        own = result.weights[key].float()
        torch.testing.assert_close(own, weight.float(), atol=rounding, rtol=rounding, msg=f"{name}: {key}")


def assert_same(one: Result, other: Result) -> None:
    assert one.loss == other.loss
    assert [key for key in other.weights if not torch.equal(one.weights[key], other.weights[key])] == []


@pytest.mark.costly
def test_every_stage_is_the_plain_loop_and_offload_changes_no_bit(found: dict[str, Result]) -> None:
    losses, state = expected(0.05)
    assert found["zero_0"].loss == losses
    assert [key for key in state if not torch.equal(found["zero_0"].weights[key], state[key])] == []
    for name in (*EXACT, *(DRIVE if has_libaio() else ())):
        assert_close(found[name], expected(0.05 if CLIPPED[-1] in TWO[name] else None))
    for name in found:
        if name.startswith(("zero_2_", "zero_3_")):
            assert_same(found[name], found[name[:6]])
    counted = expected(loss=user_code.counted, samples=24, count=2)
    assert_close(found["counted"], counted)


@torch.no_grad()
def test_a_weight_that_a_module_reads_of_another_one_is_there(found: dict[str, Result]) -> None:
    """What DeepSpeed has noted of it in the rehearsal holds in steps and validations; else it fetches it too late."""
    samples = user_code.points()[1].tensors
    validated = []
    for steps in range(1, STEPS + 1):
        with torch.enable_grad():
            plain = expected(model=zero_model.placed, samples=24, steps=steps, count=1)
        model = zero_model.placed()
        model.load_state_dict(plain[1])
        validated.append(user_code.mean(model(samples[0]), samples[1]).item())
    for name in PLACED:
        assert_close(found[name], plain)
        assert [loss for _, loss in found[name].record["val_loss"]] == pytest.approx(validated, rel=2e-6)


def test_gradients_of_an_own_step_are_not_cleared_where_they_are_offloaded(found: dict[str, Result]) -> None:
    assert_close(found["step_2"], expected(model=zero_model.Stepping, samples=24, count=1))
    assert_same(found["step_2_cpu"], found["step_2"])


def test_narrow_formats_are_the_plain_loop_to_their_rounding(found: dict[str, Result]) -> None:
    assert_close(found["bf16_1"], expected(dtype=torch.bfloat16), 4e-2)
    assert_close(found["bf16_3"], expected(dtype=torch.bfloat16, optimizer=Masters), 4e-2)


def test_a_delayed_update_is_the_recursion_and_goes_on_with_the_one_under_way(found: dict[str, Result]) -> None:
    losses, state = plain_result(
        replicas=2, by_replica=True,
        optimizer=lambda own: Explicitly(own, lambda group: torch.optim.AdamW(group, lr=1e-3, weight_decay=0.0), 1),
    )  # fmt: skip
    assert_close(found["delayed_1"], (losses, state))  # on busy machines a bias was once not the loop's to the bit
    assert_same(found["delayed_1_resumed"], found["delayed_1"])


def test_pipelines_with_zero_are_the_plain_loop_and_halve_the_states(found: dict[str, Result]) -> None:
    plain = expected(0.05)
    assert found["bytes_grid"].loss == plain[0]
    for name in ("bytes_grid", "bytes_grid_1", "grid_2_cpu", "bytes_grid_own"):
        assert_close(found[name], plain)
    whole, shared, own = (
        live(found[name])["state elements"] for name in ("bytes_grid", "bytes_grid_1", "bytes_grid_own")
    )
    for each in (shared, own):
        assert whole / 2 <= each <= whole / 2 + 8  # two states, each padded by at most an alignment


def test_frozen_weights_keep_their_bits_and_the_others_learn_as_without_zero(found: dict[str, Result]) -> None:
    torch.manual_seed(0)
    start = user_code.model().state_dict()
    for name in ("frozen", "frozen_own"):
        assert_close(found[name], (found["frozen"].loss, found["frozen"].weights))
        for key, weight in found[name].weights.items():
            assert torch.equal(weight, start[key]) == (key.split(".")[0] == "0"), (name, key)


def test_kinds_of_few_bits_are_the_plain_loop_and_go_on_bit_by_bit(found: dict[str, Result]) -> None:
    def adam8bit(parameters: Any) -> torch.optim.Optimizer:
        from bitsandbytes.optim.adamw import AdamW8bit

        made: torch.optim.Optimizer = AdamW8bit(parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)  # type: ignore[no-untyped-call]  # the library's
        return made

    for name in ("onebit", "blocks"):
        assert_same(found[f"{name}_resumed"], found[name])
        for told in zip(*found[name].record["state_bytes"].values(), strict=True):
            for part in told[0]:
                assert told[1][part] == pytest.approx(told[0][part], rel=2e-3), (name, part)
    plain = plain_result(zero_model.model, replicas=2, count=2, by_replica=True, optimizer=adam8bit)
    assert_close(found["blocks"], plain, 3e-4)  # one block may lie on both ranks, with a scale on each
    assert_close(found["onebit"], plain_onebit(), 1e-5)
    sent = found["onebit"].record["bytes_moved"]
    half = found["onebit"].record["state_bytes"]["measured"][0]["gradients"]  # a step's all-reduce of one rank of two
    # In two of four steps; in the others two ranks tell each other at most whether their gradients are finite.
    assert sent["weight_gradients"] == pytest.approx(half, abs=4)
    assert 0 < sent["optimizer_states"] < half / 2 / 15


def live(result: Result) -> dict[str, int]:
    """Bytes and elements that rank 0 has counted of its live tensors."""
    made: dict[str, int] = json.loads((result.run_dir / "live.json").read_text(encoding="utf-8"))
    return made


def predicted(overrides: Sequence[str]) -> tuple[int, int]:
    """Of one rank: between steps, and when gradients are there."""
    asked = ("data.target=user_code:points", "loss.target=user_code:mean")
    config = resolve([*asked, "data.batch_size=8", "device=cpu", *overrides])
    profile = profile_model(config)
    (figures,) = stage_figures(profile, [(0, len(profile.layers) - 1)])
    sharing = present(sharing_of(config, profile, OPTIMIZERS[config.optimizer.name].temporaries))
    held = sharing.held(figures)
    # The bucket is let go, and the last partition of gradients is there, when the update begins.
    arrives = sharing.stage < 3 and sharing.optimizer == "none"
    gradients = figures.gradient_bytes // 2 if arrives else 0
    return held.device + held.host, held.device + held.host + gradients


@pytest.mark.costly
@pytest.mark.parametrize("name", BYTES)
def test_live_and_moved_bytes_are_the_predicted_ones(found: dict[str, Result], name: str) -> None:
    between, arrived = predicted(BYTES[name])
    assert live(found[name])["between steps"] == pytest.approx(between, rel=0.02)
    assert live(found[name])["gradients are there"] == pytest.approx(arrived, rel=0.02)
    peaks = found[name].record["peak_memory_bytes"]
    assert 0.8 < max(peaks["measured"]) / max(peaks["predicted"]) < 1.05
    moved = found[name].record["bytes_moved"]
    weights, gradients = between_ranks(found[name])
    assert moved["weight_gradients"] == gradients
    assert moved["weights"] in weights


def between_ranks(result: Result) -> tuple[tuple[int, ...], int]:
    """Weights and their gradients: an all-reduce sends 2 n, a gather or a scatter n, both ranks together.

    Each step has two micro-batches, for each of which ZeRO 3 gathers once, or a second time for the backward.
    """
    name = result.run_dir.name
    width, stage = (2 if "bf16" in " ".join(BYTES[name]) else 4), int(name.split("_")[1])
    sizes = [weight.numel() for weight in result.weights.values()]
    flat = width * -(-sum(sizes) // 4) * 4  # the partitions of two replicas, each of an even number of elements
    apart = width * sum(-(-size // 2) * 2 for size in sizes)  # each weight's own partitions
    if stage == 3:
        return (2 * apart, 2 * 2 * apart), 2 * apart
    return (flat,), stage * 2 * width * sum(sizes)


@pytest.mark.parametrize("name", [*PEAKS, "pipe"])
def test_counted_peaks_are_the_predicted_ones_of_every_rank(found: dict[str, Result], name: str) -> None:
    """But for losses and headers, for norms that are not there before an offloaded update, and for a message to a rank
    that has not taken it yet, which is alive longer on a busy machine.
    """
    peaks = found[name].record["peak_memory_bytes"]
    gaps = [real - said for real, said in zip(peaks["measured"], peaks["predicted"], strict=True)]
    message = 8192 if name == "pipe" else 0
    assert all(-64 - (1024 if name == "offloaded" else 0) <= gap <= message for gap in gaps), gaps
    if name == "several":
        assert peaks["predicted"][0] != peaks["predicted"][1]


def test_what_is_moved_to_the_host_is_a_part_of_a_steps_seconds(found: dict[str, Result]) -> None:
    for name in ("zero_1", "zero_2_cpu", "delayed_1", "zero_3_cpu"):
        parts = found[name].record["seconds"]
        assert (parts["offload"] > 0) == (name != "zero_1"), name
