"""``runner verify`` with real ranks: right layouts are equal, and every broken engine is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from covering import sampled
from resume_runs import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = [
    "model.target=resume_zoo:model",
    "data.target=resume_zoo:data",
    "loss=mse",
    "data.batch_size=13",
    "schedule.microbatches=3",
    "device=cpu",
    "--steps",
    "2",
    "--json",
]
LAYOUTS = {
    "single": [],
    "naive": ["schedule=naive", "parallelism.pipeline=2"],
    "gpipe": ["schedule=gpipe", "parallelism.pipeline=2", "trainer.grad_clip_norm=0.1", "partition=memory"],
    "1f1b": ["schedule=1f1b", "parallelism.pipeline=3"],
    "bf16": ["parallelism.pipeline=2", "precision=bf16"],
    "data": ["parallelism.data=2", "model.target=resume_zoo:normed"],
    "pipeline x data": ["parallelism.pipeline=2", "parallelism.data=2", "optimizer=sgd", "optimizer.momentum=0.9"],
    "three replicas": ["parallelism.data=3"],
    "cosine": ["parallelism.pipeline=2", "lr_scheduler=cosine", "lr_scheduler.warmup_steps=2", "data.workers=1"],
    "zb_v": ["schedule=zb_v", "parallelism.pipeline=2", "trainer.grad_clip_norm=0.1"],
    "looped_bfs": ["schedule=looped_bfs", "parallelism.pipeline=2"],
    "auto": ["schedule=auto", "parallelism.pipeline=2"],
    "tied": ["parallelism.pipeline=2", "model.target=resume_zoo:tied"],
    "kfac": ["parallelism.pipeline=2", "optimizer=kfac", "optimizer.momentum=0.9", "optimizer.refresh_every=1"],
    "pipefisher": [
        "schedule=pipefisher",
        "parallelism.pipeline=2",
        "optimizer=kfac",
        "--steps",
        "5",
        "cost.curvature=0.4",
    ],
    "manual": ["parallelism.pipeline=2", "partition=manual", "partition.boundaries=[4]"],
}
OFTEN = ("pipeline x data", "tied")
FULL = pytest.mark.full
BROKEN = {
    "wrong_scale": (["parallelism.pipeline=2"], 1, "0.weight"),
    "dropped_microbatch": (["parallelism.pipeline=2"], 1, "0.weight"),
    "stale_weight": (["parallelism.pipeline=2"], 2, "0.weight"),
    "missing_reduce": (["parallelism.data=2"], 1, "0.weight"),
    "swapped_target": (["parallelism.pipeline=2"], 1, "0.weight"),
    "untied_weight": (["parallelism.pipeline=2", "model.target=resume_zoo:tied"], 1, "2.weight"),
    "no_clip": (["parallelism.pipeline=2", "trainer.grad_clip_norm=0.01"], 1, "0.weight"),
}


def verify(directory: Path, *overrides: str, entry: str | None = None) -> tuple[int, dict[str, Any], str]:
    line, environment = command("verify", *SMALL, *overrides)
    if entry is not None:
        code = (
            "import sys, runner.launch.verify as v; from runner.cli.main import main; right = v.verify;"
            f"v.verify = lambda config, **k: right(config, **k, entry='broken_engines:{entry}');"
            "sys.exit(main(sys.argv[1:]))"
        )
        line = [sys.executable, "-c", code, *line[3:]]
    done = warm.run(line, env=environment, cwd=directory, timeout=280)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.parametrize("layout", [name if name in OFTEN else pytest.param(name, marks=FULL) for name in LAYOUTS])
def test_right_layouts_are_equal(layout: str, tmp_path: Path) -> None:
    status, document, said = verify(tmp_path, *LAYOUTS[layout])
    assert status == 0, said
    assert document["equal"] is True
    assert document["first_difference"] is None
    in_order = layout not in ("three replicas", "looped_bfs", "tied")
    assert document["promise"] == ("bitwise" if in_order else "rounding")
    assert document["bitwise"] is True or not in_order
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("entry", sampled(BROKEN, "untied_weight"))
def test_broken_engines_are_found(entry: str, tmp_path: Path) -> None:
    overrides, step, parameter = BROKEN[entry]
    status, document, said = verify(tmp_path, *overrides, entry=entry)
    assert status == 4, said
    assert document["equal"] is False
    assert document["first_difference"]["step"] == step
    assert document["first_difference"]["parameter"] == parameter
    assert document["max_abs_difference"]["gradients"] > 0
