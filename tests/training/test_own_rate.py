"""A learning rate of the user's own: each step of a run has it, and what is wrong with it is told."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from whole_runs import train

from runner.cli.request import checked
from runner.config.compose.resolve import resolve
from runner.errors import RequestError

_MODULE = """
import torch

def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

def data():
    torch.manual_seed(6)
    return [(torch.randn(4), torch.randn(2)) for _ in range(32)]

def rate(step, total_steps, peak, floor=0.0):
    return max(floor, peak * (total_steps - 1 - step) / total_steps if step < total_steps else 1 / 0)

def nothing(step, total_steps, peak):
    return None if step else peak

def wrong(step, total_steps):
    return 0.1
"""
_WORDS = (
    *("model=custom", "model.target=rates:model", "data=custom", "data.target=rates:data", "loss=mse", "device=cpu"),
    *("data.batch_size=4", "data.shuffle=false", "optimizer=sgd", "optimizer.lr=0.5", "hardware=laptop_cpu"),
    *("logger=none", "trainer.progress=false", "launcher.watchdog_seconds=null", "checkpoint.every=3"),
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rates.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def plain(steps: int) -> dict[str, torch.Tensor]:
    """The last weights of a loop in plain PyTorch, whose rate of step k of n is 0.5 (n - 1 - k) / n, 0.05 at least."""
    theirs = import_module("rates")
    model, samples = theirs.model(), theirs.data()
    for step in range(steps):
        inputs, targets = (torch.stack(part) for part in zip(*samples[4 * step : 4 * step + 4], strict=True))
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        weights = list(model.parameters())
        rate = max(0.05, 0.5 * (steps - 1 - step) / steps)
        with torch.no_grad():
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.sub_(rate * gradient)
    return dict(model.state_dict())


@pytest.mark.parametrize("layout", [(), ("parallelism.pipeline=2", "schedule.microbatches=2")])
def test_every_step_has_the_rate_that_the_function_returns(place: Path, layout: tuple[str, ...]) -> None:
    words = [
        *_WORDS,
        *layout,
        "lr_scheduler.target=rates:rate",
        "lr_scheduler.kwargs.floor=0.05",
        "trainer.max_steps=6",
    ]
    train(resolve(words), place)
    torch.testing.assert_close(load_file(place / "weights.safetensors"), plain(6), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("lr_scheduler.target=rates:nothing",),
            "must return a finite number, 0 or above. At step 99 of 100 it returned",
        ),
        (("lr_scheduler.target=rates:wrong",), "must run with the arguments that it is given. Calling it raised"),
        (
            ("lr_scheduler.target=rates:rat",),
            "must name a function of that module. rates has no function rat.",
        ),
        (
            ("lr_scheduler=cosine", "lr_scheduler.target=rates:rate"),
            "belongs to a learning rate of your own. cosine",
        ),
        (
            ("lr_scheduler.target=rates:rate", "lr_scheduler.warmup_steps=2"),
            "belongs to a learning rate of the runner'",
        ),
    ],
)
def test_what_is_wrong_with_it_is_told_before_the_run(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(RequestError) as caught:
        checked([*_WORDS, *words], command="train")
    (problem,) = caught.value.problems
    assert problem.path.startswith("lr_scheduler.")
    assert told in problem.line()
