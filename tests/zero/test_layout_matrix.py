"""Any layout goes on from any layout's checkpoint, as one process would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from user_project import plain_result
from zero_ranks import Result, train_groups

STEPS = 6
SAMPLES = 37  # five steps an epoch, the last one short: a run that is cut after three goes on within an epoch
COMMON = (
    "schedule.microbatches=4", "trainer.grad_clip_norm=0.9", f"data.kwargs.samples={SAMPLES}",
    f"trainer.max_steps={STEPS}", "checkpoint.every=3", "checkpoint.keep=9",
)  # fmt: skip
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


@pytest.mark.costly
def test_one_run_goes_through_all_layouts(tmp_path: Path) -> None:
    """One step in each, the last of them in the first one again: every layout is left and gone on with.

    Its checkpoints are in parts.
    """
    layouts = (*CHAIN, "single")
    chain = []
    for step, layout in enumerate(layouts):
        before = (f"resume={checkpoint(tmp_path / str(step - 1), step)}",) if step else ()
        parts = "checkpoint.asynchronous=true"
        chain.append(group(layout, str(step), f"trainer.max_steps={step + 1}", parts, *before))
    found = train_groups(tmp_path, chain)
    assert_one_process(
        found[str(len(CHAIN))], *plain_result(samples=SAMPLES, steps=len(layouts), count=4, clip_norm=0.9)
    )
