"""Packages that a request needs, and whether they are installed; nothing is imported to find out."""

from __future__ import annotations

import importlib.util

from runner.config.schema import SERVICE_LOGGERS, RunConfig
from runner.errors import Problem
from runner.model.device import device_type
from runner.optim.catalogue.registry import find_optimizer
from runner.optim.operators import has_ninja

__all__ = ["missing_for_plan", "missing_packages"]


def missing_packages(config: RunConfig) -> dict[str, Problem]:
    """The packages that a run of this request needs and that are not installed here, each with what needs it."""
    return {
        **_of_zero(config),
        **_of_operator(config),
        **_of_logger(config),
        **missing_for_plan(config),
        **_of_kernels(config),
    }


def missing_for_plan(config: RunConfig) -> dict[str, Problem]:
    """The missing packages without which the request's model, data and optimizer cannot be measured.

    For another machine than this one nothing is timed, so that the optimizer's package may be missing here.
    """
    return {
        **_of_functions(config),
        **_of_adapter(config),
        **_of_kernels(config, measured=config.hardware.name == "auto"),
        **(_of_optimizer(config) if config.hardware.name == "auto" else {}),
    }


def _of_functions(config: RunConfig) -> dict[str, Problem]:
    return {
        package: _problem(f"{name}.target", section.target, package, install)
        for name, section in (("model", config.model), ("data", config.data))
        for package, install in section.needs.items()
        if not _is_installed(package)
    }


def _of_adapter(config: RunConfig) -> dict[str, Problem]:
    if config.adapter.name == "none" or _is_installed("peft"):
        return {}
    return {"peft": _problem("adapter", config.adapter.name, "peft", "-e '.[finetune]'")}


def _of_kernels(config: RunConfig, *, measured: bool = True) -> dict[str, Problem]:
    """Liger's operators run on CUDA alone, with its package where they run or are measured here."""
    asked = [each for each in ("norm", "elementwise", "loss") if getattr(config.kernels, each) == "liger"]
    if not asked:
        return {}
    path = f"kernels.{asked[0]}"
    if device_type(config) != "cuda":
        why = "Liger's operators are Triton kernels for CUDA"
        return {"liger_kernel": Problem(path, "liger", "must be null, eager or fused on a CPU", why, "kernels=none")}
    if not measured or _is_installed("liger_kernel"):
        return {}
    return {"liger_kernel": _problem(path, "liger", "liger_kernel", "-e '.[liger]'")}


def _of_optimizer(config: RunConfig) -> dict[str, Problem]:
    kind = find_optimizer(config.optimizer)
    if kind is None or kind.package is None or _is_installed(kind.package):
        return {}
    return {kind.package: _problem("optimizer.name", config.optimizer.name, kind.package)}


def _of_zero(config: RunConfig) -> dict[str, Problem]:
    if config.zero.stage is None or _is_installed("deepspeed"):
        return {}
    return {"deepspeed": _problem("zero.stage", config.zero.stage, "deepspeed")}


def _of_operator(config: RunConfig) -> dict[str, Problem]:
    """DeepSpeed compiles the operator of some optimizers with ninja."""
    kind = find_optimizer(config.optimizer)
    if kind is None or kind.operator is None or has_ninja():
        return {}
    return {"ninja": _problem("optimizer.name", config.optimizer.name, "ninja")}


def _of_logger(config: RunConfig) -> dict[str, Problem]:
    asked = [name for name in (config.logger.name, *config.logger.others) if name in SERVICE_LOGGERS]
    return {package: _problem("logger", package, package) for package in asked if not _is_installed(package)}


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _problem(path: str, value: object, package: str, install: str | None = None) -> Problem:
    return Problem(path, value, f"needs {package}, which is not installed", fix=f"pip install {install or package}")
