"""Any layout goes on from any layout's checkpoint, as one process would."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from user_project import assert_same_weights, plain_result
from zero_ranks import Result, train_groups

STEPS = 6
SAMPLES = 37  # five steps an epoch, the last one short: a run that is cut after three goes on within an epoch
COMMON = (
    "schedule.microbatches=4", "trainer.grad_clip_norm=0.9", f"data.kwargs.samples={SAMPLES}",
    f"trainer.max_steps={STEPS}", "checkpoint.every=3", "checkpoint.keep=9",
)  # fmt: skip
PARTS = "checkpoint.asynchronous=true"
LAYOUTS = {
    "single": (1, ()),
    "pipeline_2": (2, ("parallelism.pipeline=2",)),
    "pipeline_3_data_2": (6, ("parallelism.pipeline=3", "parallelism.data=2")),
    "zero_1": (2, ("parallelism.data=2", "zero.stage=1")),
    "zero_3": (2, ("parallelism.data=2", "zero.stage=3")),
    "pipeline_2_zero_1": (4, ("parallelism.pipeline=2", "parallelism.data=2", "zero.stage=1")),
    "chimera_2": (2, ("parallelism.pipeline=2", "schedule=chimera")),
    "zb_v_2": (2, ("parallelism.pipeline=2", "schedule=zb_v")),
}
CHAIN = (
    "single", "chimera_2", "zero_1", "pipeline_2", "zero_3", "zb_v_2", "pipeline_2_zero_1", "pipeline_3_data_2",
)  # fmt: skip


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step}.ckpt"


def group(layout: str, name: str, *more: str) -> tuple[int, dict[str, tuple[str, ...]]]:
    ranks, overrides = LAYOUTS[layout]
    return ranks, {name: (*COMMON, *overrides, *more)}


def assert_one_process(found: Result, losses: list[float], state: dict[str, torch.Tensor]) -> None:
    assert found.loss == pytest.approx(losses, rel=2e-6), found.run_dir.name
    for name, weight in state.items():
        torch.testing.assert_close(found.weights[name], weight, atol=5e-6, rtol=5e-6, msg=f"{found.run_dir}: {name}")


@pytest.mark.slow
def test_one_run_goes_through_all_layouts(tmp_path: Path) -> None:
    """One step in each, the last of them in the first one again: every layout is left and gone on with.

    Its checkpoints are in parts, and those of the whole matrix are not.
    """
    layouts = (*CHAIN, "single")
    chain = []
    for step, layout in enumerate(layouts):
        before = (f"resume={checkpoint(tmp_path / str(step - 1), step)}",) if step else ()
        chain.append(group(layout, str(step), f"trainer.max_steps={step + 1}", PARTS, *before))
    found = train_groups(tmp_path, chain)
    assert_one_process(
        found[str(len(CHAIN))], *plain_result(samples=SAMPLES, steps=len(layouts), count=4, clip_norm=0.9)
    )


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_layout_from_every_layout(tmp_path: Path) -> None:
    """Three steps, a checkpoint, three steps in another layout; in the same one, the bits of six in a row."""
    whole = train_groups(tmp_path, [group(layout, layout) for layout in LAYOUTS], seconds=1200)
    pairs = sorted(itertools.product(LAYOUTS, LAYOUTS), key=lambda pair: LAYOUTS[pair[1]][0])
    by_ranks: dict[int, dict[str, tuple[str, ...]]] = {}
    for first, second in pairs:
        ranks, runs = group(second, f"{first}-to-{second}", f"resume={checkpoint(tmp_path / first, 3)}")
        by_ranks.setdefault(ranks, {}).update(runs)
    found = train_groups(tmp_path, list(by_ranks.items()), seconds=3000)
    losses, state = plain_result(samples=SAMPLES, steps=STEPS, count=4, clip_norm=0.9)
    for name, result in (whole | found).items():
        assert_one_process(result, losses, state)
        first, _, second = name.partition("-to-")
        if first == second:
            assert result.loss == whole[first].loss, name
            assert_same_weights(result.weights, whole[first].weights)
