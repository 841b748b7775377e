"""Every precision equals the plain loop that a user would write in one process, in losses and weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from layouts import EngineFormat, make_engine, part_of, train_in_threads
from precisions import PLAIN, train
from torch import nn

from runner.engine.loss_scale import LossScale, LossScaling
from runner.engine.options import FinishedStep
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.optim.build import build_optimizer
from runner.optim.states.master import MasterWeights

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
loss_function = nn.functional.cross_entropy
COUNT, BATCH = 4, 16
SCALING = LossScaling(initial_scale=2.0**10, growth_interval=2, samples=BATCH)


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))


def make_batches(steps: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(BATCH, 6, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator))
        for _ in range(steps)
    ]


ENGINE: dict[str, EngineFormat] = {
    "bf16_master": {"dtype": torch.bfloat16, "masters": True},
    "bf16_mixed": {"autocast": torch.bfloat16},
    "fp16": {"dtype": torch.float16, "masters": True, "scaling": SCALING},
    "fp16_mixed": {"autocast": torch.float16, "scaling": SCALING},
}
SCALES = [2.0**10, 2.0**10, 2.0**11, 2.0**11]


def trained(precision: str, pipeline: int, **options: Any) -> tuple[list[list[float]], dict[str, Any]]:
    layout: dict[str, Any] = {"schedule": "1f1b", "pipeline": pipeline, "data": 1, "count": COUNT}
    options |= ENGINE[precision]
    return train_in_threads(make_model, loss_function, make_batches(), optimizer=adamw, **layout, **options)


def by_hand(precision: str, **clip: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_model()
    losses = train(
        PLAIN[precision], model, loss_function, make_batches(), count=COUNT, optimizer=adamw, scales=SCALES, **clip
    )
    return losses, model.state_dict()


@pytest.mark.parametrize("clip", [{"clip_norm": 0.05}, {"clip_value": 0.01}])
def test_what_masters_are_updated_by_is_clipped(clip: dict[str, Any]) -> None:
    expected, state = by_hand("fp16", **clip)
    losses, weights = trained("fp16", 2, **clip)
    assert losses == [expected] * 2
    assert [name for name in state if not torch.equal(weights[name], state[name])] == []
    free = by_hand("fp16")[1]
    assert any(not torch.equal(free[name], state[name]) for name in state), "it does clip"


def test_the_norm_is_clipped_after_unscaling() -> None:
    """A norm of the scaled gradients would be a thousand times as large, and everything would be clipped."""
    free, clipped = (trained("fp16_mixed", 2, clip_norm=clip_norm) for clip_norm in (None, 1e3))
    assert free[0] == clipped[0]
    assert all(torch.equal(free[1][name], clipped[1][name]) for name in free[1])


class OverflowsOnce(nn.Module):
    """Identity whose backward is infinite in one step: what float16 does to a large gradient."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.calls = step, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.training and self.calls == self.step * COUNT + 2:  # in its second micro-batch
            x = x.clone()
            x.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]  # the library's
        return x


def run_overflow(
    stage: int, options: dict[str, Any]
) -> list[tuple[list[FinishedStep], list[dict[str, torch.Tensor]], float]]:
    """Per rank: what each step gave, the weights after each step, the scale at the end; step 1 overflows."""

    def model() -> nn.Sequential:
        layers = list(make_model())
        layers[2 * stage + 1] = nn.Sequential(layers[2 * stage + 1], OverflowsOnce(1))
        return nn.Sequential(*layers)

    models = [model() for _ in range(3)]

    def run(transport: ThreadTransport) -> tuple[list[FinishedStep], list[dict[str, torch.Tensor]], float]:
        engine = make_engine(
            models[transport.rank], loss_function, transport, schedule="1f1b", pipeline=3, data=1, count=COUNT,
            optimizer=adamw, **options,
        )  # fmt: skip
        steps: list[FinishedStep] = []
        weights: list[dict[str, torch.Tensor]] = []
        for batch in make_batches():
            steps += engine.submit(part_of(batch, transport, 3, 1))
            state = {k: v.clone() for s in engine.stages.values() for k, v in s.global_state().items()}
            weights.append(state)
        engine.drain()
        return steps, weights, engine.update.scale.value

    return run_ranks(3, run)


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp16"), (2, "fp16_mixed")])
def test_an_overflow_on_any_stage_skips_the_step_on_every_rank(stage: int, precision: str) -> None:
    options: dict[str, Any] = {**ENGINE[precision], "scaling": LossScaling(initial_scale=2.0**10, samples=BATCH)}
    for steps, weights, scale in run_overflow(stage, options):
        assert [step.skipped for step in steps] == [False, True, False, False]
        assert [step.loss_scale for step in steps] == [2.0**10, 2.0**10, 2.0**9, 2.0**9], "it halves once"
        assert scale == 2.0**9
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]), "skipped: bitwise unchanged"
        assert any(not torch.equal(weights[1][name], weights[2][name]) for name in weights[1])
        assert all(torch.isfinite(value).all() for value in weights[-1].values())


def test_without_scaling_a_step_is_skipped_where_asked() -> None:
    for steps, weights, _ in run_overflow(2, {"skip_nonfinite": True}):
        assert [step.skipped for step in steps] == [False, True, False, False]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_scale_follows_gradscaler() -> None:
    """The same verdicts give the same scales as torch's own."""
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    own = LossScale(LossScaling(initial_scale=2.0**4, growth_interval=2))
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for bad in [0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0]:
        torch_scaler.scale(weight.sum() * (math.inf if bad else 1.0)).backward()  # type: ignore[no-untyped-call]  # the library's
        torch_scaler.step(optimizer)
        torch_scaler.update()
        optimizer.zero_grad()
        if bad:
            assert own.overflowed()
        else:
            own.succeeded()
        assert own.value == torch_scaler.get_scale()


def test_at_the_minimum_an_overflow_is_none_of_the_scales_making() -> None:
    scale = LossScale(LossScaling(initial_scale=4.0, minimum_scale=1.0))
    assert [scale.overflowed() for _ in range(4)] == [True, True, False, False]
    assert scale.value == 1.0


def test_a_resumed_scale_grows_when_the_uncut_one_does() -> None:
    first, second = (LossScale(LossScaling(initial_scale=4.0, growth_interval=3)) for _ in range(2))
    first.succeeded()
    first.succeeded()
    second.load_state_dict(first.state_dict())
    second.succeeded()
    assert second.value == 8.0


def test_the_batch_does_not_change_what_a_sample_is_scaled_by() -> None:
    assert LossScale(LossScaling(initial_scale=64.0, samples=16)).of_sum == 4.0
    assert LossScale(LossScaling(initial_scale=64.0, samples=24)).of_sum == 4.0, "a power of two"
    assert LossScale(None).of_sum == 1.0


def test_master_weights_keep_updates_that_16_bits_lose() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterWeights([weight], lambda masters: torch.optim.SGD(masters, lr=1e-3))
    for _ in range(10):
        optimizer.master_of(weight).grad = torch.ones(4)
        optimizer.step()
    assert optimizer.state[weight]["master"] == pytest.approx(torch.full((4,), 0.99))
    assert torch.equal(weight.detach(), torch.full((4,), 0.99).bfloat16())


def test_master_weights_are_saved_and_loaded_in_full_precision() -> None:
    def made() -> tuple[nn.Parameter, MasterWeights]:
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        return weight, MasterWeights([weight], adamw)

    def step(weight: nn.Parameter, optimizer: MasterWeights) -> None:
        optimizer.master_of(weight).grad = torch.full((4,), 0.3)
        optimizer.step()

    first, one = made()
    torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.5)
    step(first, one)
    second, two = made()
    two.load_state_dict(one.state_dict())
    assert two.param_groups[0]["lr"] == one.param_groups[0]["lr"] == 5e-3
    step(first, one)
    step(second, two)
    assert torch.equal(one.master_of(first), two.master_of(second))
    assert two.state[second]["exp_avg"].dtype is torch.float32


def test_the_configured_optimizer_gets_masters() -> None:
    from runner.config.schema import OptimizerConfig

    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    assert isinstance(build_optimizer(OptimizerConfig(), [weight], master_weights=True), MasterWeights)
    assert type(build_optimizer(OptimizerConfig(), [weight])) is torch.optim.AdamW
