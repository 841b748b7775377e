"""Models of transformers, as they are, under ``parallelism=auto``: each trains as one process does, within its plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_folders import ARCHITECTURES
from torch.nn import functional
from whole_runs import peaks, train

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.launch.run.find_layout import FoundLayout, find_layout

_SAMPLES, _STEPS, _RATE, _EPS, _DECAY = 8, 2, 0.01, 1e-3, 0.1
_DATA = """
import torch
from pretrained_folders import ARCHITECTURES

def data(name, samples):
    case, generator = ARCHITECTURES[name], torch.Generator().manual_seed(7)
    inputs, targets = case.inputs(samples, generator), case.targets(samples, generator)
    rows = zip(*inputs) if isinstance(inputs, tuple) else inputs
    return list(zip(rows, targets))
"""


def alone(name: str, folder: Path) -> list[float]:
    """The losses of a plain loop over transformers' own model."""
    case = ARCHITECTURES[name]
    model, generator, losses = case.open(folder), torch.Generator().manual_seed(7), []
    inputs, targets = case.inputs(_SAMPLES * _STEPS, generator), case.targets(_SAMPLES * _STEPS, generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, eps=_EPS, weight_decay=_DECAY)
    for step in range(_STEPS):
        part = slice(step * _SAMPLES, (step + 1) * _SAMPLES)
        given = tuple(each[part] for each in inputs) if isinstance(inputs, tuple) else inputs[part]
        logits = case.logits(model, given)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[part].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def every_step(found: FoundLayout) -> Iterator[float]:
    """Seconds of whole plans with what is named: all orders and micro-batches, and all cuts, of very many a part."""
    problem, answer = found.problem, found.chosen.best.answer
    for order, count in product(problem.orders, (1, 2, 4, 8)):
        stages = answer.pipeline * order.chunks
        cuts = [(0, *inner, len(problem.layers)) for inner in combinations(range(1, len(problem.layers)), stages - 1)]
        for cut in cuts[:: 1 + len(cuts) // 20]:
            ranges = tuple((first, end - 1) for first, end in pairwise(cut))
            other = replace(answer, order=order, microbatches=count, stages=ranges, kept=("none",) * stages)
            with suppress(RequestError):  # some orders take no fewer micro-batches
                yield found.judge.plan(found.judge.keys(other)).time.step_seconds


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("llama", ("parallelism.ranks=4", "parallelism.pipeline=2", "parallelism.tensor=2")),
        ("t5", ("parallelism.ranks=2", "parallelism.pipeline=2")),
    ],
)
def test_it_trains_as_one_process(
    name: str,
    named: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "automatic_data.py").write_text(_DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = ARCHITECTURES[name].save(tmp_path / name)
    words = [
        *("model=huggingface", f"model.pretrained={folder}", "data=custom", "data.target=automatic_data:data"),
        *(f"data.kwargs.name={name}", f"data.kwargs.samples={_SAMPLES * _STEPS}", f"data.batch_size={_SAMPLES}"),
        *("data.shuffle=false", "loss=cross_entropy", "parallelism=auto", "parallelism.search=quick", *named),
        *(f"optimizer.lr={_RATE}", f"optimizer.eps={_EPS}", f"optimizer.weight_decay={_DECAY}", "device=cpu"),
        *("hardware=laptop_cpu", "logger=none", "trainer.progress=false", f"trainer.max_steps={_STEPS}"),
        *(["model.kwargs.task=seq2seq"] if name == "t5" else []),
    ]
    capsys.readouterr()  # what transformers has said
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["layout"]["pipeline"] * found["layout"]["tensor"] * found["layout"]["data"] > 1
    for word in named[1:]:
        key, _, degree = word.removeprefix("parallelism.").partition("=")
        assert found["layout"][key] == int(degree)
    layout = find_layout(words)
    steps = [*every_step(layout)]
    assert len(steps) > 100
    assert layout.chosen.best.plan.time.step_seconds <= min(steps) * 1.03
    (tmp_path / "run").mkdir()
    run = train(resolve(found["request"]), tmp_path / "run")
    assert all(counted <= predicted for counted, predicted in peaks(run))
    losses = alone(name, folder)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(losses), rtol=2e-6, atol=2e-6)
