"""Compiles operators of DeepSpeed on request: one row for each, with the compiler's first error."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from collections.abc import Sequence

from runner.launch.doctor.rows import Check
from runner.launch.needs.zero import has_libaio
from runner.optim.operators import BuildError, build_operator, has_ninja

__all__ = ["builds"]


def builds(names: Sequence[str]) -> list[Check]:
    """Compile the operators ``names`` (keys of :data:`runner.optim.operators.OPERATORS`) for this machine's device
    type.
    """
    if not names:
        return []
    if importlib.util.find_spec("deepspeed") is None:
        fix = "pip install deepspeed"
        return [Check(name, False, "deepspeed is not installed", fix, needed=True) for name in names]
    import torch

    return [_build(name, "cuda" if torch.cuda.is_available() else "cpu") for name in names]


def _build(name: str, accelerator: str) -> Check:
    try:
        folder = build_operator(name, accelerator=accelerator)
    except BuildError as error:
        return Check(name, False, error.said[0].strip(), _fix(name, error), needed=True)
    return Check(name, True, f"compiled, {folder}" if folder is not None else "came with deepspeed", needed=True)


def _fix(name: str, error: BuildError) -> str:
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    if shutil.which(compiler) is None:
        return f"there is no compiler {compiler}: apt-get install g++, or set CXX"
    if not has_ninja():
        return "pip install ninja"
    if name == "async_io" and not has_libaio():
        return "apt-get install libaio-dev"
    return f"all that was said is in {error.log}"
