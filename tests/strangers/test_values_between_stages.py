"""Values of many kinds between layers: equal to plain PyTorch over whole batches, or refused before step 1."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import boundary_values
import pytest
import torch
from boundary_values import CARRIED, KINDS, REFUSED, WHOLE
from layouts import train_in_threads
from requests_in_threads import in_plain_pytorch
from torch import Tensor

from runner.config.compose.resolve import resolve
from runner.errors import RequestError, RunFailedError
from runner.memory.apply.install import install
from runner.model.boundary import CannotPassError, flatten
from runner.model.layers import StageModule
from runner.plan.make import make_plan
from runner.profiling.model import profile_model
from runner.schedule.catalogue.registry import build
from runner.schedule.values import Schedule

STEPS, BATCH = 3, 8


class Draw(NamedTuple):
    """A model, and how it is trained."""

    kinds: list[str]
    pipeline: int
    schedule: str
    microbatches: int
    policy: str
    seed: int = 0

    @property
    def words(self) -> list[str]:
        words = [
            "model.target=boundary_values:build", f"+model.kwargs.kinds=[{','.join(map(repr, self.kinds))}]",
            f"+model.kwargs.seed={self.seed}", "data.target=boundary_values:data", "loss.target=boundary_values:loss",
            "optimizer=sgd", "optimizer.lr=0.1", "lr_scheduler=constant", f"data.batch_size={BATCH}",
            "data.shuffle=false", f"parallelism.pipeline={self.pipeline}", f"schedule={self.schedule}",
            f"activation_checkpoint={self.policy}", "device=cpu", "hardware=a100_80gb", "logger=none",
        ]  # fmt: skip
        return [*words, f"schedule.microbatches={self.microbatches}"]


def batches() -> list[tuple[Tensor, Tensor]]:
    data = boundary_values.data()
    inputs, targets = data.tensors
    return [(inputs[at : at + BATCH], targets[at : at + BATCH]) for at in range(0, STEPS * BATCH, BATCH)]


def plain(draw: Draw) -> tuple[list[float], dict[str, Tensor]]:
    """What plain PyTorch gives for whole batches."""
    model = boundary_values.build(draw.kinds, draw.seed)
    given = ((inputs.clone(), targets) for inputs, targets in batches())
    return in_plain_pytorch(model, boundary_values.loss, given), model.state_dict()


def run(draw: Draw) -> tuple[list[float], dict[str, Tensor]]:
    """What a plan gives whose stages are threads.

    Raises:
        RequestError: the plan is refused.
    """
    config = resolve(draw.words)
    profile = profile_model(config)
    plan = make_plan(config, profile)

    def prepare(stage: StageModule, number: int) -> None:
        install(stage, plan.activations.stages[number])

    return in_threads(draw, plan.schedule, cut=plan.partition, prepare=prepare, sizes_vary=profile.sizes_vary)


def in_threads(draw: Draw, schedule: str | Schedule, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train in a thread for each rank."""
    losses, weights = train_in_threads(
        partial(boundary_values.build, draw.kinds, draw.seed), boundary_values.loss, batches(), schedule=schedule,
        pipeline=draw.pipeline, data=1, count=draw.microbatches, optimizer=partial(torch.optim.SGD, lr=0.1), **options,
    )  # fmt: skip
    return losses[0], weights


def assert_same(
    expected: tuple[list[float], Mapping[str, Tensor]], made: tuple[list[float], dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(made[0], expected[0], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(dict(made[1]), dict(expected[1]), rtol=2e-6, atol=2e-7)


def assert_equal_or_refused(draw: Draw) -> str:
    """Return "equal", or the reason of a refusal."""
    expected = plain(draw)
    try:
        made = run(draw)
    except RequestError as error:
        return str(error)
    assert_same(expected, made)
    return "equal"


@pytest.mark.costly
@pytest.mark.parametrize("kind", CARRIED)
def test_each_kind_crosses_with_its_type(kind: str) -> None:
    """The layers check the types of what they get."""
    draw = Draw([kind, kind], 3, "1f1b", 1 if kind in WHOLE else 2, "none")
    assert_same(plain(draw), in_threads(draw, draw.schedule, sizes_vary=True))


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "interleaved_1f1b", "bpipe", "pipefb", "chimera", "dualpipe_v"])
def test_shapes_that_depend_on_values(schedule: str) -> None:
    """Also where saved tensors wait on another rank, or a backward runs on one."""
    draw = Draw(["rows by values"] * 3, 2, schedule, 4, "none")
    order = build(schedule, ranks=2, microbatches=4)
    assert_same(plain(draw), in_threads(draw, order, sizes_vary=True))


def test_values_that_depend_on_a_state_end_the_run_with_the_reason() -> None:
    """A run without a profile, of a script, has not seen what the values depend on."""
    draw = Draw(["a number by values"] * 3, 2, "1f1b", 2, "none")
    with pytest.raises(RunFailedError, match=r"stage 0 gave \[\(4, 6\) float32\] in .* the profile saw no layer that"):
        in_threads(draw, "1f1b", sizes_vary=False)


@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind != "changed in shared memory"])
def test_what_cannot_cross_is_named(kind: str) -> None:
    with pytest.raises(CannotPassError, match=KINDS[kind].refused):
        flatten(boundary_values.build([kind])[0](torch.randn(4, boundary_values.WIDTH)))


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["set", "changed in shared memory"])
def test_it_is_refused_before_the_first_step(kind: str) -> None:
    told = assert_equal_or_refused(Draw([kind], 2, "1f1b", 2, "none"))
    assert KINDS[kind].refused in told
    assert len(told.splitlines()) == 1


@pytest.mark.costly
def test_a_plan_says_that_its_bytes_are_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(["rows by values"], 2, "1f1b", 2, "none")
    config = resolve([word for word in draw.words if not word.startswith("hardware=")])
    profile = profile_model(config)
    assert profile.sizes_vary
    assert profile.sizes_were_seen_to_vary
    assert any("other samples give other shapes" in note for note in make_plan(config, profile).advice)


@pytest.fixture(autouse=True)
def _own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path_factory.getbasetemp() / "profiles"))
