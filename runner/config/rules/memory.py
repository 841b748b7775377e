"""Rules of what is kept for the backward, and where: activation checkpoints, offloading, compiled layers."""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.schema import RunConfig
from runner.errors import Problem, did_you_mean

__all__ = ["POLICIES", "SAVE_OPS", "memory_rules"]

POLICIES = ("none", "full", "periodic", "selective", "manual")
SAVE_OPS = ("matmuls", "attention", "every_second_matmul")
_OFFLOADED_ACTIVATIONS = ("none", "save_on_cpu")

# Each option of the section, the policy that it belongs to, and a value to show.
_OPTIONS = {"every": ("periodic", "2"), "save_ops": ("selective", "matmuls"), "layers": ("manual", "[0]")}


def memory_rules(config: RunConfig) -> Iterator[Problem]:
    """Every rule of the sections ``activation_checkpoint`` and ``offload``, and of ``compile``, that is broken."""
    yield from _options(config)
    yield from _values(config)
    yield from _offload(config)
    yield from _combinations(config)


def _options(config: RunConfig) -> Iterator[Problem]:
    """A policy's own option must be there, the others' must not."""
    section = config.activation_checkpoint
    for key, (policy, example) in _OPTIONS.items():
        path, value = f"activation_checkpoint.{key}", getattr(section, key)
        if section.name == policy and value is None:
            yield Problem(path, None, "must be given", f"The policy {policy} needs it", f"{path}={example}")
        elif section.name in POLICIES and section.name != policy and value is not None:
            why = f"The policy {section.name} has no use for it"
            yield Problem(path, _shown(value), f"belongs to activation_checkpoint={policy}", why, f"{path}=null")


def _values(config: RunConfig) -> Iterator[Problem]:
    section = config.activation_checkpoint
    if section.every is not None and section.every < 1:
        path = "activation_checkpoint.every"
        yield Problem(path, section.every, "must be at least 1", fix=f"{path}=1")
    if section.save_ops is not None and section.save_ops not in SAVE_OPS:
        path = "activation_checkpoint.save_ops"
        near = did_you_mean(section.save_ops, SAVE_OPS) or SAVE_OPS[0]
        yield Problem(path, section.save_ops, f"must be one of {', '.join(SAVE_OPS)}", fix=f"{path}={near}")
    if section.layers is not None and not section.layers:
        path = "activation_checkpoint.layers"
        yield Problem(path, "[]", "must name at least one layer", fix="activation_checkpoint=none")


def _offload(config: RunConfig) -> Iterator[Problem]:
    offload = config.offload
    if offload.activations not in _OFFLOADED_ACTIVATIONS:
        known = ", ".join(_OFFLOADED_ACTIVATIONS)
        fix = f"offload.activations={did_you_mean(offload.activations, _OFFLOADED_ACTIVATIONS) or 'none'}"
        yield Problem("offload.activations", offload.activations, f"must be one of {known}", fix=fix)


def _combinations(config: RunConfig) -> Iterator[Problem]:
    selective = config.activation_checkpoint.name == "selective"
    if selective and config.offload.activations == "save_on_cpu":
        why = "The hooks that move saved tensors do not see what a selective policy keeps: it would stay on the device"
        fix = "activation_checkpoint=full or offload=none"
        yield Problem("offload.activations", "save_on_cpu", "must not meet activation_checkpoint=selective", why, fix)
    if selective and config.compile:
        why = "It keeps the outputs of single operators, and a compiled layer has none that it could see"
        fix = "activation_checkpoint=full or compile=false"
        yield Problem("compile", True, "must be false with activation_checkpoint=selective", why, fix)


def _shown(value: object) -> object:
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else value
