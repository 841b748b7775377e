"""Each optimizer against its reference: torch's Adam, the papers' formulas, libraries called directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from narrow import gradient, present
from torch import nn

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.config.schema import LrSchedulerConfig, OptimizerConfig
from runner.errors import RequestError
from runner.optim.build import build_optimizer, observed_state_ratio
from runner.optim.catalogue.registry import OPTIMIZERS
from runner.optim.learning_rate import build_scheduler, learning_rate

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1}
STEPS = 20
Maker = Callable[[Sequence[torch.Tensor]], Any]  # of an optimizer, or of what stands for one


def trained(make: Maker, steps: int = STEPS) -> tuple[list[torch.Tensor], Any]:
    """Weights after training a small model; the largest of its tensors has 8192 elements, the smallest 64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    optimizer = make(list(model.parameters()))
    for step in range(steps):
        model.zero_grad()
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        (model(inputs) - inputs).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()], optimizer


def ours(name: str, **more: Any) -> Maker:
    config = OptimizerConfig(name=name, **(SETTINGS | more))
    return lambda parameters: build_optimizer(config, parameters)


def torchs(kind: Callable[..., torch.optim.Optimizer], **more: Any) -> Maker:
    settings: dict[str, Any] = {**SETTINGS, "betas": tuple(SETTINGS["betas"])}
    return lambda parameters: kind(parameters, **settings, **more)


def farthest(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def test_adam_decays_weights_as_told() -> None:
    assert farthest(trained(ours("adam"))[0], trained(torchs(torch.optim.Adam))[0]) == 0
    decoupled = trained(ours("adam", decoupled_weight_decay=True))[0]
    assert farthest(decoupled, trained(torchs(torch.optim.AdamW))[0]) == 0


def test_adam8bit_is_near_adamw_and_keeps_a_byte_per_moment() -> None:
    """The deviation of its 8-bit blocks from fp32 moments: a few hundredths, as published for 200 steps."""
    weights, optimizer = trained(ours("adam8bit"))
    expected, start = trained(torchs(torch.optim.AdamW))[0], trained(torchs(torch.optim.AdamW), steps=0)[0]
    moved = torch.cat([(a - b).flatten() for a, b in zip(expected, start, strict=True)])
    away = torch.cat([(a - b).flatten() for a, b in zip(weights, expected, strict=True)])
    assert 0 < float(away.norm() / moved.norm()) < 0.05
    for parameter, state in optimizer.state.items():
        found = sum(state[key].nbytes for key in ("state1", "state2", "absmax1", "absmax2") if key in state)
        assert found == present(OPTIMIZERS["adam8bit"].state_bytes)(parameter.numel())


@pytest.mark.parametrize(("name", "library", "most"), [("adam4bit", "AdamW4bit", 0.3), ("adam_fp8", "AdamWFp8", 0.1)])
def test_few_bits_are_torchaos_and_near_adamw(
    name: str, library: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchao.optim

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    weights, optimizer = trained(ours(name))
    assert farthest(weights, trained(torchs(getattr(torchao.optim, library)))[0]) == 0
    expected, start = trained(torchs(torch.optim.AdamW))[0], trained(torchs(torch.optim.AdamW), steps=0)[0]
    moved = torch.cat([(a - b).flatten() for a, b in zip(expected, start, strict=True)])
    away = torch.cat([(a - b).flatten() for a, b in zip(weights, expected, strict=True)])
    assert 0 < float(away.norm() / moved.norm()) < most
    for parameter, state in optimizer.state.items():
        found = sum(value.nbytes for value in state.values() if value.dim())
        assert found == present(OPTIMIZERS[name].state_bytes)(parameter.numel())


def adam_without_bias_correction(parameters: Sequence[torch.Tensor]) -> Any:
    """The textbook's, in the plainest form."""

    class Plain:
        def __init__(self) -> None:
            self.first = [torch.zeros_like(p) for p in parameters]
            self.second = [torch.zeros_like(p) for p in parameters]

        @torch.no_grad()
        def step(self) -> None:
            beta1, beta2 = SETTINGS["betas"]
            for p, m, v in zip(parameters, self.first, self.second, strict=True):
                m.copy_(beta1 * m + (1 - beta1) * gradient(p))
                v.copy_(beta2 * v + (1 - beta2) * gradient(p) ** 2)
                p.sub_(SETTINGS["lr"] * (m / (v.sqrt() + SETTINGS["eps"]) + SETTINGS["weight_decay"] * p))

    return Plain()


def test_onebit_adam_warms_up_as_adam_without_bias_correction() -> None:
    weights, optimizer = trained(ours("onebit_adam", freeze_step=STEPS))
    assert farthest(weights, trained(adam_without_bias_correction)[0]) < 1e-6
    assert float(optimizer.compression.worker_error.abs().max()) == 0
    frozen, _ = trained(ours("onebit_adam", freeze_step=STEPS - 1))
    assert farthest(weights, frozen) > 1e-5  # the last step was compressed


def test_onebit_adam_leaves_weights_alone_that_had_no_gradient_until_it_froze() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(8, 4)
    start = table.weight.detach().clone()
    optimizer = ours("onebit_adam", freeze_step=2, weight_decay=0.0)([table.weight])
    for rows in ([0, 1], [0, 1], [0, 5], [1, 6]):
        optimizer.zero_grad()
        table(torch.tensor(rows)).pow(2).sum().backward()
        optimizer.step()
    assert torch.equal(table.weight[2:], start[2:])
    assert bool((table.weight[:2] != start[:2]).all())


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["fused_adam", "cpu_adam"])
def test_deepspeeds_adam_is_adamw_to_rounding(name: str) -> None:
    """Its operators are compiled at their first use, which takes minutes."""
    assert farthest(trained(ours(name))[0], trained(torchs(torch.optim.AdamW))[0]) < 1e-5
    coupled = trained(ours(name, decoupled_weight_decay=False))[0]
    assert farthest(coupled, trained(torchs(torch.optim.Adam))[0]) < 1e-5


REFUSED = [
    ("optimizer=adam8bit optimizer.decoupled_weight_decay=false", "optimizer.decoupled_weight_decay", "no other"),
    ("optimizer=adamw optimizer.freeze_step=5", "optimizer.freeze_step", "whole gradients"),
    ("optimizer=lars optimizer.eps=1e-3", "optimizer.eps", "no meaning"),
    ("optimizer=adam4bit zero.stage=1", "optimizer.name", "blocks"),
    ("optimizer=lamb zero.stage=1", "optimizer.name", "norms"),
    ("optimizer=custom", "optimizer.target", "your own function"),
    ("optimizer=custom optimizer.target=a:b optimizer.weight_decay=0.1", "optimizer.weight_decay", "kwargs alone"),
    ("optimizer=adamw optimizer.target=a:b", "optimizer.target", "no function of yours"),
    ("optimizer=onebit_adam optimizer.freeze_step=null", "optimizer.freeze_step", "variance"),
    ("optimizer=onebit_lamb optimizer.freeze_step=9", "optimizer.freeze_step", "running mean"),
    ("optimizer=onebit_lamb optimizer.variance_refreshes=4", "optimizer.variance_refreshes", "no steps"),
    ("optimizer=onebit_lamb zero.stage=1", "optimizer.name", "momentum of all weights"),
    ("optimizer=onebit_adam_refreshed optimizer.variance_refreshes=null", "optimizer.variance_refreshes", "doubles"),
    ("optimizer=onebit_adam_refreshed trainer.grad_clip_value=1", "trainer.grad_clip_value", "sum of gradients"),
    ("optimizer=kfac optimizer.refresh_every=0", "optimizer.refresh_every", ""),
    ("optimizer=sgd optimizer.damping=0.1", "optimizer.damping", "no factors"),
    ("optimizer=kfac", "parallelism.data", "other samples"),
    ("optimizer=kfac zero.stage=0", "zero.stage", "DeepSpeed"),
    ("optimizer=kfac precision=bf16_mixed", "precision.name", "inverses"),
    ("optimizer=kfac compile=true", "compile", "hooks"),
    ("optimizer=kfac activation_checkpoint=full", "activation_checkpoint.name", "inputs would stay"),
    ("optimizer=kfac offload=activations_save_on_cpu", "offload.activations", "device"),
    ("optimizer=kfac schedule.post_validation=true", "schedule.post_validation", "taken back"),
    ("optimizer=onebit_adam schedule.post_validation=true", "schedule.post_validation", "left over"),
]


@pytest.mark.costly
@pytest.mark.parametrize(("overrides", "path", "why"), REFUSED)
def test_what_cannot_be_is_refused_with_its_reason(overrides: str, path: str, why: str) -> None:
    found = rules(resolve(["model=mlp", "parallelism.data=2", *overrides.split()]))
    (problem,) = [problem for problem in found if problem.path == path]
    assert why in problem.why
    assert problem.fix


def test_cpu_adam_brings_its_offload() -> None:
    config = resolve(["model=mlp", "parallelism.data=2", "optimizer=cpu_adam", "zero.stage=2"])
    assert config.offload.optimizer == "cpu"
    assert rules(config) == []


def lars_in_ten_lines(
    parameters: Sequence[torch.Tensor], momentum: float = 0.9, decay: float = 0.1, lr: float = 0.5
) -> Any:
    held = [torch.zeros_like(p) for p in parameters]

    class Plain:
        @torch.no_grad()
        def step(self) -> None:
            for p, v in zip(parameters, held, strict=True):
                change = gradient(p)
                if p.dim() > 1:
                    local = 1e-3 * p.norm() / (change.norm() + decay * p.norm())
                    change = local * (change + decay * p)
                v.copy_(momentum * v + change)
                p.sub_(lr * v)

    return Plain()


def lamb_in_ten_lines(parameters: Sequence[torch.Tensor]) -> Any:
    beta1, beta2 = SETTINGS["betas"]
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))

    class Plain:
        steps = 0

        @torch.no_grad()
        def step(self) -> None:
            self.steps += 1
            for p, m, v in zip(parameters, first, second, strict=True):
                m.copy_(beta1 * m + (1 - beta1) * gradient(p))
                v.copy_(beta2 * v + (1 - beta2) * gradient(p) ** 2)
                update = m / (v.sqrt() + SETTINGS["eps"]) + SETTINGS["weight_decay"] * p
                ratio = p.norm().clamp(max=10) / (update.norm() + SETTINGS["eps"])
                p.sub_(SETTINGS["lr"] / (1 - beta1**self.steps) * ratio * update)

    return Plain()


def test_lars_is_the_papers() -> None:
    lars: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8}
    assert farthest(trained(ours("lars", **lars))[0], trained(lars_in_ten_lines)[0]) < 1e-6


def test_lamb_is_the_papers_with_the_librarys_bias_correction() -> None:
    assert farthest(trained(ours("lamb"))[0], trained(lamb_in_ten_lines)[0]) < 1e-5


def test_lamb_goes_on_by_parameter_as_if_it_had_not_stopped() -> None:
    whole, first = trained(ours("lamb"))[0], trained(ours("lamb"), steps=STEPS // 2)
    parameters = [nn.Parameter(value.clone()) for value in first[0]]
    another = ours("lamb")(parameters)
    kept = list(first[1].state.values())
    for parameter, state in zip(parameters, kept, strict=True):
        assert set(state) == {"exp_avg", "exp_avg_sq", "step"}
        another.state[parameter] = dict(state)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    for step in range(STEPS // 2, STEPS):
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        names = [name for name, _ in model.named_parameters()]
        output = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), inputs)
        another.zero_grad()
        (output - inputs).pow(2).mean().backward()
        another.step()
    assert farthest(whole, [parameter.detach() for parameter in parameters]) == 0


def half_sgd(parameters: list[nn.Parameter], lr: float, momentum: float = 0.0) -> torch.optim.Optimizer:
    """A user's own."""
    return torch.optim.SGD(parameters, lr=lr / 2, momentum=momentum)


def not_an_optimizer(parameters: list[nn.Parameter], lr: float) -> float:
    return lr


def test_custom_calls_the_users_function_and_sees_what_it_keeps() -> None:
    named: dict[str, Any] = {"target": f"{__name__}:half_sgd", "weight_decay": 0.0}
    weights = trained(ours("custom", **named, kwargs={"momentum": 0.5}))[0]
    expected = trained(lambda given: torch.optim.SGD(given, lr=SETTINGS["lr"] / 2, momentum=0.5))[0]
    assert farthest(weights, expected) == 0
    config = OptimizerConfig(name="custom", target=named["target"])
    assert observed_state_ratio(lambda given: build_optimizer(config, given)) == 0
    config.kwargs = {"momentum": 0.5}
    assert observed_state_ratio(lambda given: build_optimizer(config, given)) == 1
    config = OptimizerConfig(name="custom", target=f"{__name__}:not_an_optimizer")
    with pytest.raises(RequestError, match="returned a float"):
        build_optimizer(config, [nn.Parameter(torch.zeros(2))])


def test_the_rate_goes_with_the_batch_where_it_was_said_for_another_one() -> None:
    words = ["model=mlp", "data.batch_size=64", "optimizer.lr=0.1", "lr_scheduler=linear", "trainer.max_steps=10"]
    for more, peak in (([], 0.1), (["lr_scheduler.base_batch=16"], 0.4)):
        config = resolve([*words, *more])
        assert rules(config) == []
        optimizer = build_optimizer(config.optimizer, [nn.Parameter(torch.zeros(2))])
        scheduler = build_scheduler(config, optimizer)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(peak)
        for _ in range(5):
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(peak / 2)


@pytest.mark.parametrize(("name", "half"), [("linear", 0.5), ("cosine", 0.5), ("warmup_decay", 0.5), ("constant", 1.0)])
def test_a_decay_ends_at_the_step_that_is_asked_for(name: str, half: float) -> None:
    """Two runs of one decay have other numbers of steps than it: the rate does not depend on theirs."""
    for steps in (4, 20, 50):
        rate = learning_rate(LrSchedulerConfig(name=name, total_steps=20), 1.0, steps)
        assert rate(10) == pytest.approx(half)
        assert rate(20) == (1.0 if name == "constant" else 0.0)
    assert learning_rate(LrSchedulerConfig(name=name), 1.0, 40)(20) == pytest.approx(half), "else at the run's last one"
