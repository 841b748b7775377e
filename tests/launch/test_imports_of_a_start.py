"""A start imports what its request needs. Modules are counted, not seconds: imports are nearly all of a start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_imports import OF_BOTH, OF_THE_COMMAND

ROOT = Path(__file__).resolve().parents[2]

# Packages that no rank of a plain request uses, although Lightning or torch's optimizers would import them.
FORBIDDEN = {
    *(
        "scipy",
        "sympy",
        "matplotlib",
        "transformers",
        "PIL",
        "pandas",
        "deepspeed",
        "bitsandbytes",
        "torchao",
        "optuna",
    ),
    *("torch._dynamo.convert_frame", "torch._inductor", "torchmetrics.functional"),
}
# How many modules torch brings differs by its version and build: 783 of a rank for CPUs, 924 for CUDA.
OF_TORCH = {"torch", "triton", "cuda", "nvidia"}
# Counted with Lightning 2.6, and a little more: 1187, since the command opens the data, and 1579, of which 549 are the
# runner's own.
MOST_OF_COMMAND, MOST_OF_RANK = 1250, 1650

# Every process writes its modules at its end. A template of ranks ends without, and its ranks have all of its modules.
NOTING = """
import atexit, os, sys
def note():
    name = "rank" if "RANK" in os.environ else "command"
    with open(os.path.join(os.environ["MODULES_OF_PROCESSES"], f"{name}-{os.getpid()}"), "w") as file:
        file.write("\\n".join(sys.modules))
atexit.register(note)
"""


def run(*words: str, noting: Path, into: Path) -> None:
    """Run the command in ``noting``, and have all its processes write there what they have imported."""
    into.mkdir()
    own = {"PYTHONPATH": os.pathsep.join([str(noting), str(ROOT)]), "MODULES_OF_PROCESSES": str(into)}
    line = [sys.executable, "-m", "runner", *words]
    subprocess.run(line, env={**os.environ, **own}, cwd=noting, capture_output=True, check=True, timeout=1500)


@pytest.mark.costly
def test_a_start_imports_what_the_request_needs(tmp_path: Path) -> None:
    """A first profile of a model is made of fake tensors, which need much more; later starts read it."""
    (tmp_path / "sitecustomize.py").write_text(NOTING)
    # Seconds of a named machine are not measured, so that no load of this one has them measured again.
    words = ["model=mlp", "trainer.max_steps=2", "device=cpu", "hardware=a100_80gb"]
    run("plan", *words, noting=tmp_path, into=tmp_path / "of_the_plan")
    run("train", *words, "run_dir=run", noting=tmp_path, into=tmp_path / "of_the_start")
    noted = tmp_path / "of_the_start"
    imported = {file.name.partition("-")[0]: file.read_text().split("\n") for file in noted.iterdir()}
    assert imported.keys() == {"command", "rank"}
    for process, modules in imported.items():
        assert sorted(FORBIDDEN & set(modules)) == [], process
    assert [name for name in imported["rank"] if name.startswith(OF_THE_COMMAND)] == [*OF_BOTH]  # and makes no plan
    assert "lightning" not in imported["command"]
    for process, most in (("command", MOST_OF_COMMAND), ("rank", MOST_OF_RANK)):
        assert len([name for name in imported[process] if name.partition(".")[0] not in OF_TORCH]) < most, process
