"""What libraries say of themselves is not shown: a command's standard error is the runner's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Imports torchao as transformers does, after the runner has begun; torchao tells of kernels that it lacks.
TORCHAO = "import torchao, torchao.kernel.intmm, torchao.prototype.mx_formats"


@pytest.mark.costly
def test_torchao_and_torch_are_silent_about_themselves(tmp_path: Path) -> None:
    code = f"from runner.noise import hide_noise; hide_noise(); {TORCHAO}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=1500)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_libraries_that_come_with_transformers_are_silent_about_themselves(tmp_path: Path) -> None:
    """bitsandbytes looks for kernels, DeepSpeed for a GPU, and PEFT warns from its own modules."""
    said = """
import importlib.util, logging, warnings
from runner.noise import hide_noise
hide_noise()
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load kernels")
deepspeeds = logging.getLogger("DeepSpeed")
deepspeeds.setLevel(logging.WARNING)
deepspeeds.warning("Setting accelerator to CPU. If you have GPU")
warnings.warn_explicit("merge", UserWarning, "layer.py", 1, module="peft.tuners.lora.layer")
deepspeeds.warning("what a user must read")
warnings.warn_explicit("read this", UserWarning, "mine.py", 1, module="mine")
"""
    done = subprocess.run([sys.executable, "-c", said], cwd=tmp_path, capture_output=True, text=True, timeout=1500)
    assert [line for line in done.stderr.splitlines() if line.strip()] == [
        "what a user must read",
        "mine.py:1: UserWarning: read this",
    ]


def test_nothing_that_compiled_code_writes_to_standard_output_gets_through() -> None:
    code = """
import os
from runner.noise import silent_output
print("before")
with silent_output():
    os.write(1, b"a line for developers")
print("behind")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "before\nbehind\n"


def test_a_process_without_standard_output_is_left_as_it_is() -> None:
    code = "from runner.noise import silent_output\nwith silent_output(): pass"
    subprocess.run([sys.executable, "-c", f"import os; os.close(1)\n{code}"], check=True)
