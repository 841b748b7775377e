"""``runner verify`` with real ranks: right layouts are equal, and broken engines are found."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import warm
from resume_runs import command

COMMON = ["device=cpu", "--steps", "2", "--json"]
SMALL = [
    *COMMON,
    "model.target=resume_zoo:model",
    "data.target=resume_zoo:data",
    "loss=mse",
    "data.batch_size=13",
    "schedule.microbatches=3",
]
GPT = [
    *COMMON,
    "model=gpt",
    "model.kwargs.width=16",
    "model.kwargs.layers=2",
    "data.batch_size=4",
    *(f"{group}.kwargs.{size}" for group in ("model", "data") for size in ("vocab_size=131", "sequence_length=8")),
]
LAYOUTS = {
    "pipeline x data": ["parallelism.pipeline=2", "parallelism.data=2", "optimizer=sgd", "optimizer.momentum=0.9"],
    "tied": ["parallelism.pipeline=2", "model.target=resume_zoo:tied"],
}
RUDALLE = [*COMMON, "model=rudalle_tiny", "model.kwargs.layers=1", "data.batch_size=2"]
MLP = [*COMMON, "model=mlp", "parallelism.sharding={0.0: column_gathered, 1.0: column_gathered}"]
IN_STAGES = (
    "parallelism.pipeline=2", "schedule.microbatches=2", "parallelism.sequence=true", "trainer.grad_clip_norm=0.01"
)  # fmt: skip
BROKEN = {
    "stale_weight": (["parallelism.pipeline=2"], 2, "0.weight"),
    "untied_weight": (["parallelism.pipeline=2", "model.target=resume_zoo:tied"], 1, "2.weight"),
}


def verify(
    directory: Path, *overrides: str, base: Sequence[str] = SMALL, entry: str | None = None
) -> tuple[int, dict[str, Any], str]:
    line, environment = command("verify", *base, *overrides)
    if entry is not None:
        code = (
            "import sys, runner.launch.verify as v; from runner.cli.main import main; right = v.verify;"
            f"v.verify = lambda config, **k: right(config, **k, entry='broken_engines:{entry}');"
            "sys.exit(main(sys.argv[1:]))"
        )
        line = [sys.executable, "-c", code, *line[3:]]
    done = warm.run(line, env=environment, cwd=directory, timeout=1500)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.costly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_layouts_are_equal(layout: str, tmp_path: Path) -> None:
    status, document, said = verify(tmp_path, *LAYOUTS[layout])
    assert status == 0, said
    assert document["equal"] is True
    assert document["first_difference"] is None
    in_order = layout != "tied"
    assert document["promise"] == ("bitwise" if in_order else "rounding")
    assert document["bitwise"] is True or not in_order
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
@pytest.mark.parametrize(
    ("base", "layout", "rounding", "of_weights"),
    [
        (GPT, ("parallelism.tensor=2", *IN_STAGES), 2e-6, 1e-3),
        (GPT, ("parallelism.tensor=4", "precision=fp64"), 1e-13, 1e-11),
        (RUDALLE, ("parallelism.tensor=2",), 2e-6, 1e-3),
        (MLP, ("parallelism.tensor=4",), 2e-6, 1e-3),
    ],
    ids=["gpt", "gpt in fp64", "rudalle", "mlp"],
)
def test_divided_layers_are_equal_with_rounding_and_to_the_same_parts_without(
    base: list[str], layout: Sequence[str], rounding: float, of_weights: float, tmp_path: Path
) -> None:
    """Neither 2 nor 4 divides the GPT's 131 tokens. Adam moves a weight far by the rounding of a gradient of zero."""
    status, document, said = verify(tmp_path, *layout, base=base)
    assert status == 0, said
    assert document["equal"] is True
    assert document["promise"] == "rounding"
    of_parts = document["of_parts"]
    assert (of_parts["promise"], of_parts["bitwise"]) == ("bitwise", True)
    assert of_parts["parameters"] == document["parameters"] > 0
    differences = document["max_abs_difference"]
    assert 0 < differences["gradients"] < rounding
    assert differences["loss"] < rounding
    assert differences["weights"] < of_weights


@pytest.mark.costly
def test_an_error_as_small_as_rounding_is_found_beside_the_same_parts(tmp_path: Path) -> None:
    status, document, said = verify(tmp_path, "parallelism.tensor=2", base=GPT, entry="rounded_gradient")
    assert status == 4, said
    assert document["first_difference"] is None
    first = document["of_parts"]["first_difference"]
    assert (first["step"], first["quantity"], first["parameter"]) == (1, "gradient", "0.tokens.weight")


@pytest.mark.costly
def test_what_an_optimizer_makes_of_rounding_is_the_same_for_parts(tmp_path: Path) -> None:
    """Weights of 16 bits differ after the first step; an optimizer that is wrong for parts would look the same."""
    words = ("parallelism.tensor=2", "precision=bf16_master", "optimizer=lamb", "optimizer.lr=0.1")
    status, document, said = verify(tmp_path, *words, base=GPT)
    assert status == 4, said
    assert document["first_difference"]["quantity"] == "weight"
    assert document["of_parts"]["bitwise"] is True


@pytest.mark.costly
def test_layers_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    status, document, said = verify(tmp_path, "model=mlp", "parallelism.tensor=2", base=COMMON)
    assert (status, document) == (2, {})
    assert said.startswith("parallelism.tensor = 2: must divide a layer. left whole: 0.0.weight: its result leaves the")


@pytest.mark.costly
@pytest.mark.parametrize("entry", BROKEN)
def test_broken_engines_are_found(entry: str, tmp_path: Path) -> None:
    overrides, step, parameter = BROKEN[entry]
    status, document, said = verify(tmp_path, *overrides, entry=entry)
    assert status == 4, said
    assert document["equal"] is False
    assert document["first_difference"]["step"] == step
    assert document["first_difference"]["parameter"] == parameter
    assert document["max_abs_difference"]["gradients"] > 0
