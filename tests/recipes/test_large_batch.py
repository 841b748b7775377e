"""The recipe of large batches: its measurements against closed forms, its arithmetic, and its requests."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.optim.learning_rate import learning_rate, peak_rate
from runner.recipes.large_batch.figures import draw
from runner.recipes.large_batch.measure import gradient_noise, gradients_of, largest_eigenvalue, mean_loss
from runner.recipes.large_batch.rules import BATCHES, RULES, Cell, cells
from runner.recipes.large_batch.tables import closed_share, markdown, slope


def _problem(sign: float) -> tuple[nn.Module, Any]:
    """A small model in float64 and its loss; ``sign`` turns the Hessian around."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs, targets = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))
    return model, lambda: sign * functional.cross_entropy(model(inputs), targets)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_eigenvalue_is_that_of_the_whole_hessian(sign: float) -> None:
    model, loss = _problem(sign)
    weights = [*model.parameters()]
    gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss(), weights, create_graph=True)])
    rows = [torch.autograd.grad(each, weights, retain_graph=True) for each in gradient]
    hessian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    found = largest_eigenvalue(model, loss, most=3000, tolerance=1e-12)
    assert found == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-4)


def test_variances_of_a_partition_are_those_of_one_sample_divided_by_the_batch() -> None:
    """Of gradients that are drawn: the mean over many random orders, without a correction for the size of the set."""
    samples = torch.randn(48, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    single = float(samples.var(dim=0).sum())
    orders = [samples[torch.randperm(48, generator=torch.Generator().manual_seed(seed))] for seed in range(400)]
    found = [gradient_noise(order, 1, (1, 4, 12)) for order in orders]
    for at, batch in enumerate((1, 4, 12)):
        mean = sum(each[at].variance for each in found) / len(found)
        assert mean == pytest.approx(single / batch, rel=1e-9 if batch == 1 else 0.06)
        assert found[0][at].batches == 48 // batch


def test_gradients_of_batches_are_those_of_their_samples() -> None:
    """The gradient of the mean of (w x - y)^2 / 2 is the mean of (w x - y) x."""
    model = nn.Linear(1, 1, bias=False)
    inputs, targets = torch.arange(1.0, 8.0)[:, None], torch.arange(7.0, 0.0, -1.0)[:, None]

    def loss(model: nn.Module, part: slice) -> Tensor:
        error: Tensor = model(inputs[part]) - targets[part]
        return error.square().mean() / 2

    weight = float(model.weight.detach())
    each = ((weight * inputs - targets) * inputs).flatten()
    expected = torch.stack([each[:2].mean(), each[2:4].mean(), each[4:6].mean()])[:, None]
    assert torch.allclose(gradients_of(model, loss, 7, 2), expected)
    assert mean_loss(model, loss, 7, at_once=3) == pytest.approx(float(loss(model, slice(7)).detach()))


def test_every_cell_sees_the_same_samples_and_may_run() -> None:
    every = [*cells()]
    for cell in (*every[:: len(RULES) + 1], every[-1]):  # each rule and each batch at least once
        config = resolve(cell.overrides)
        assert config.trainer.max_steps * config.data.batch_size == 12_288
        assert rules(config) == []
    assert len({cell.folder for cell in cells()}) == len(BATCHES) * len(RULES)


def test_rates_follow_the_rules() -> None:
    rates = {rule: [peak_rate(resolve(Cell(rule, batch).overrides)) for batch in (24, 1536)] for rule in RULES}
    assert rates["fixed rate"][1] == rates["fixed rate"][0]
    assert rates["linear scaling, warm-up"][1] == pytest.approx(64 * rates["linear scaling, warm-up"][0])
    for rule in ("LARS", "LAMB"):
        assert rates[rule][1] == pytest.approx(8 * rates[rule][0]), rule
    config = resolve(Cell("linear scaling, warm-up", 96).overrides)  # 128 steps, of which 16 rise
    rate = learning_rate(config.lr_scheduler, peak_rate(config), config.trainer.max_steps)
    assert rate(0) == pytest.approx(peak_rate(config) / 16)
    assert rate(15) == rate(16) == pytest.approx(peak_rate(config))
    assert rate(127) < peak_rate(config) / 100


def _row(rule: str, batch: int, val: float | None) -> dict[str, Any]:
    told: dict[str, Any] = {"rule": rule, "batch": batch, "steps": 8, "rate": 0.1}
    return told if val is None else {**told, "train": val - 0.1, "val": val, "gap": 0.1, "sharpness": 30.0}


ROWS = [
    _row("fixed rate", 24, 2.0), _row("LAMB", 24, 1.5), _row("fixed rate", 96, 4.0), _row("LAMB", 96, 2.5),
    _row("LARS", 96, 4.5), _row("linear scaling, warm-up", 96, None),
]  # fmt: skip
NOISE = [{"batch": 24, "batches": 9, "variance": 0.8, "gradient": 2.0}]
NOISE.append({"batch": 96, "batches": 2, "variance": 0.2, "gradient": 2.0})


def test_how_much_of_the_loss_a_rule_closes() -> None:
    shares = [closed_share(row, ROWS) for row in ROWS]
    assert shares == [None, None, None, 0.75, -0.25, None]
    assert slope(NOISE) == pytest.approx(-1.0)
    made = {"rows": ROWS, "noise": {"before training": NOISE}}
    text = markdown(made)
    assert "| 96 | LAMB | 8 | 0.1 | 2.400 | 2.500 | 0.100 | 30.0 | 75% |" in text
    assert "| 96 | linear scaling, warm-up | 8 | 0.1 | failed | - | - | - | - |" in text
    assert "wins back: at 96 LAMB 75%." in text
    worse = [row for row in ROWS if row["rule"] != "LAMB"]
    assert "wins back: at 96 no rule any." in markdown({"rows": worse, "noise": {}})
    assert "power -1.00" in text
    assert "at 9.6 samples" in text  # 24 * 0.8 / 2


def test_a_mean_gradient_that_drowns_in_noise_has_no_scale() -> None:
    noise = copy.deepcopy(NOISE)
    noise[0]["gradient"] = -0.1
    assert "cannot" not in markdown({"rows": ROWS, "noise": {"x": NOISE}})
    assert "too small to be told from noise" in markdown({"rows": ROWS, "noise": {"x": noise}})
    assert math.isfinite(slope(noise))


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    path = draw(tmp_path / "a.svg", {"rows": ROWS, "noise": {"before training": NOISE}})
    assert path.stat().st_size > 1000
