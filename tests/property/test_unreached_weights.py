"""A weight that no sample of a step reaches stays as it is, as in a plain loop: weight decay and momentum wait, too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from whole_runs import train

from runner.config.compose.resolve import resolve
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.update.gradients import StageGradients
from runner.engine.update.update import Update
from runner.model.tags import ParameterTag

_MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.never, self.experts = nn.Linear(6, 6), nn.Linear(6, 6), nn.ModuleList(
            nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        found = torch.tanh(self.first(x))
        for number, expert in enumerate(self.experts):
            chosen = x[:, 0] == number
            if chosen.any():
                found = found.index_put((chosen,), expert(found[chosen]))
        return torch.cat([x[:, :1], found[:, 1:]], dim=1)

def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 3))

def data():
    made = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 6, generator=made), torch.randn(32, 3, generator=made)
    x[:, 0] = 2.0
    x[0, 0], x[4:6, 0], x[22:24, 0], x[26, 0] = 1.0, 0.0, 0.0, 1.0
    return torch.utils.data.TensorDataset(x, y)
"""
_WORDS = (
    "model=custom", "model.target=sparse:build", "data=custom", "data.target=sparse:data", "loss=mse",
    "data.batch_size=8", "data.shuffle=false", "trainer.max_steps=4", "optimizer.weight_decay=0.1", "optimizer.lr=0.05",
    "device=cpu", "hardware=laptop_cpu", "logger=none",
)  # fmt: skip


def plain(kind: Any, **settings: Any) -> dict[str, Tensor]:
    """A loop over whole batches, with what it has made of the weights."""
    made: dict[str, Any] = {}
    exec(_MODEL, made)  # noqa: S102 - the text above
    model, (x, y) = made["build"](), made["data"]().tensors
    optimizer = kind(model.parameters(), lr=0.05, weight_decay=0.1, **settings)
    for inputs, targets in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["parallelism.data=2"],
        ["parallelism.pipeline=2", "schedule=zb_h1", "schedule.microbatches=4"],
        ["parallelism.pipeline=2", "parallelism.data=2", "schedule=1f1b", "schedule.microbatches=2"],
        ["parallelism.pipeline=2", "schedule=chimera", "schedule.microbatches=2"],
        ["offload.weights=l2l", "schedule=looped_bfs", "activation_checkpoint=full"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_unreached_weights_wait(
    words: list[str], optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sparse.py").write_text(_MODEL)
    chosen = [f"optimizer={optimizer}"]
    if optimizer == "adamw":
        expected = plain(torch.optim.AdamW)
    else:
        expected, chosen = plain(torch.optim.SGD, momentum=0.9), [*chosen, "optimizer.momentum=0.9"]
    (tmp_path / "run").mkdir()
    run = train(resolve([*_WORDS, *chosen, *words]), tmp_path / "run")
    for name, weight in expected.items():
        for found in run.weights[name]:
            torch.testing.assert_close(found, weight, rtol=2e-5, atol=2e-6, msg=name)


def test_an_update_that_is_timed_has_all_gradients() -> None:
    """None of its backwards has run; were the gradients left out, a rehearsal would time an update of nothing."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    gradients = StageGradients([("a", parameters[0]), ("b", parameters[1])])
    for _ in range(2):
        gradients.reach_all()
        gradients.leave_out_unreached(gradients)
        assert all(parameter.grad is not None for parameter in parameters)
        gradients.close(applied=True)
    gradients.leave_out_unreached(gradients)
    assert all(parameter.grad is None for parameter in parameters)


def test_holders_ask_alike_after_a_step_that_only_one_of_them_finds_not_finite() -> None:
    """A tied weight's holders met with sums of other tensors in the step after an overflow, and the run died."""

    def asked(transport: ThreadTransport) -> int:
        tied, own = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        tag = ParameterTag("tied", ("tied",), (0, 1), (0, 1), transport.rank == 0, is_trained=True)
        sets = [StageGradients([("tied", tied)], tag), StageGradients([("own", own)])]
        update = Update(
            gradients=sets, pipeline=(0, 1), transport=transport, clip_norm=None, clip_value=None, scaling=None
        )
        (2 * tied).sum().backward()  # type: ignore[no-untyped-call]
        (own * (math.inf if transport.rank else 1.0)).sum().backward()  # type: ignore[no-untyped-call]
        for handle in sets[0].reduce(transport):
            handle.wait()
        update.open(1.0)
        assert not update.verdict().finite
        update.close()
        return len(sets[0].reduce(transport))

    assert run_ranks(2, asked) == [1, 1]
