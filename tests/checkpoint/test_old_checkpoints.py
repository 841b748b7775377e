"""Checkpoints that an earlier version wrote go on bit for bit as in a plain loop that starts from what they hold.

The reference reads their weights and AdamW's states with no code of the runner, and which batches they went on with,
recorded beside them; see ``old/README.md``.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_runs import command, record_of
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from warm import run

from runner.zoo.data import random_regression

OLD = Path(__file__).parent / "old"
WORDS = (
    "model=mlp", "model.kwargs.width=8", "model.kwargs.layers=4", "data=random_regression", "data.batch_size=8",
    "trainer.max_steps=6", "checkpoint.every=3", "checkpoint.keep=9", "logger=none", "device=cpu",
)  # fmt: skip
IN_TWO_STAGES = ("parallelism.pipeline=2", "schedule=1f1b", "schedule.microbatches=4", "checkpoint.asynchronous=true")
FORMS = {"whole": ((), 1), "parts": (IN_TWO_STAGES, 4)}
"""What was asked for beside :data:`WORDS`, and the number of micro-batches."""


def whole() -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights and AdamW's state of each, by name."""
    saved: dict[str, Any] = torch.load(OLD / "whole.ckpt", weights_only=True)
    return saved["state_dict"], saved["optimizer_states"][0]["state"]


def parts() -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The same, from the files of two ranks."""
    weights: dict[str, Tensor] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for file in sorted((OLD / "parts.ckpt").iterdir()):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(key)
                if found := re.fullmatch(r"state_dict/(.*)", key):
                    weights[found[1]] = tensor
                elif found := re.fullmatch(r"optimizer_states/0/state/(.*)/(\w+)", key):
                    states.setdefault(found[1], {})[found[2]] = tensor
    return weights, states


def recorded_batches() -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of steps 4 to 6.

    The targets come out of a matrix product, whose last bits depend on the processor, so that those are taken which
    this one makes of the recorded inputs.
    """
    samples, _ = random_regression(4096, 256, inputs=32, outputs=8)
    made_inputs, made_targets = samples.tensors
    recorded = load_file(OLD / "batches.safetensors")
    batches = []
    for inputs, targets in zip(recorded["inputs"], recorded["targets"], strict=True):
        rows = torch.cdist(inputs, made_inputs).argmin(dim=1)
        torch.testing.assert_close(made_inputs[rows], inputs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(made_targets[rows], targets, rtol=1e-5, atol=1e-5)
        batches.append((made_inputs[rows], made_targets[rows]))
    return batches


def mlp() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(32 if first else 8, 8), nn.GELU()) for first in (True, False, False)]
    return nn.Sequential(*blocks, nn.Linear(8, 8))


def plain_loop(
    weights: dict[str, Tensor], states: dict[str, dict[str, Tensor]], count: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of steps 4 to 6 and the weights after them."""
    model = mlp()
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {key: value.clone() for key, value in states[name].items()}
    losses = []
    for inputs, targets in recorded_batches():
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True):
            loss = nn.functional.mse_loss(model(x), y) * len(x)
            loss.backward()  # type: ignore[no-untyped-call]  # the library's
            total += float(loss.detach().double())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(len(inputs))
        optimizer.step()
        losses.append(total / len(inputs))
    return losses, model.state_dict()


@pytest.mark.costly
@pytest.mark.parametrize("form", FORMS)
def test_it_goes_on_as_the_plain_loop(form: str, tmp_path: Path) -> None:
    more, count = FORMS[form]
    held = {"whole": whole, "parts": parts}[form]()
    losses, expected = plain_loop(*held, count)
    copy = shutil.copytree if form == "parts" else shutil.copy
    checkpoint = copy(OLD / f"{form}.ckpt", tmp_path / "step-3.ckpt")
    line, environment = command("train", *WORDS, *more, "run_dir=run", f"resume={checkpoint}")
    done = run(line, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    changed = [line for line in done.stderr.splitlines() if line.startswith("changed since then")]
    told = ["device = cpu, was auto", "partition.name = auto, was uniform"]
    told += ["cost.I = null, was 1.0", "cost.W = null, was 1.0"]
    assert sorted(changed) == sorted(f"changed since then: {one}" for one in told)
    record = record_of(tmp_path / "run")
    assert record["steps"] == 6
    assert record["loss"][3:] == losses
    found = load_file(tmp_path / "run" / "weights.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_the_loop_s_states_matter() -> None:
    """A loop that begins with new states ends elsewhere, so that the test above can fail."""
    weights, states = whole()
    _, expected = plain_loop(weights, states, 1)
    none = {name: {key: torch.zeros_like(value) for key, value in held.items()} for name, held in states.items()}
    _, other = plain_loop(weights, none, 1)
    assert not any(torch.equal(expected[name], other[name]) for name in expected)
