"""Compiles a stage's layers one by one with ``torch.compile``, because random numbers are seeded between them."""

from __future__ import annotations

import importlib.util
import os
import shutil

from runner.config.schema import KernelsConfig
from runner.errors import Problem
from runner.model.layers import StageModule

__all__ = ["compile_layers", "compile_problems", "kernel_problems", "why_not_compiled"]


def compile_layers(stage: StageModule, *, share: float | None = None) -> None:
    """Compile every layer in place at its first use; parameters and their names stay the same.

    Dropout draws the same numbers as without compilation (``fallback_random``), so results differ only by rounding.

    Args:
        stage: the stage.
        share: the share of each layer's activations that its backward may be given, from 0, which is the layer's input
            alone; None = torch's own choice. It holds for all that this process compiles from now on.
    """
    if share is not None:
        import torch._functorch.config as functorch  # brings the compiler, which most runs never use

        functorch.activation_memory_budget = share
    for layer in stage.layers:
        layer.compile(options={"fallback_random": True})


def compile_problems(asked: bool, *, cuda: bool) -> list[Problem]:
    """If compilation is asked for: its requirements, on CUDA or on the CPU, that this machine does not meet."""
    why = why_not_compiled(cuda=cuda) if asked else ""
    return [Problem("compile", True, "must be false on this machine", why, "compile=false")] if why else []


def kernel_problems(config: KernelsConfig, *, cuda: bool) -> list[Problem]:
    """The switches of ``kernels`` that compile chains of operators, if this machine cannot."""
    fused = [switch for switch in ("norm", "elementwise") if getattr(config, switch) == "fused"]
    why = why_not_compiled(cuda=cuda) if fused else ""
    if not why:
        return []
    rule = "must be null on this machine"
    return [Problem(f"kernels.{switch}", "fused", rule, why, f"kernels.{switch}=null") for switch in fused]


def why_not_compiled(*, cuda: bool) -> str:
    """Why this machine cannot compile layers, for CUDA or for the CPU; empty if it can."""
    if cuda:
        has_triton = importlib.util.find_spec("triton") is not None
        return "" if has_triton else "Compiled layers on CUDA are Triton kernels, and triton is not installed"
    if any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        return ""
    return "Compiled layers on the CPU are C++, and there is no c++, g++ or clang++ in PATH"
