"""Rules of what is kept for the backward, and where: activation checkpoints, offloading, compiled layers."""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.rules.table import Row, Table, value_at, where
from runner.config.rules.values import at_least, is_given, one_of
from runner.config.schema import RunConfig

__all__ = ["MEMORY", "POLICIES", "SAVE_OPS"]

POLICIES = ("none", "full", "periodic", "selective", "manual")
SAVE_OPS = ("matmuls", "attention", "every_second_matmul")
_OFFLOADED_ACTIVATIONS = ("none", "save_on_cpu")

# Each option of the section, the policy that it belongs to, and a value to show.
_OPTIONS = {"every": ("periodic", "2"), "save_ops": ("selective", "matmuls"), "layers": ("manual", "[0]")}


def _of_policy(key: str, policy: str, example: str) -> Iterator[Row[RunConfig]]:
    """A policy's own option must be there, the others' must not."""
    path, others = f"activation_checkpoint.{key}", set(POLICIES) - {policy}
    yield Row(
        path,
        lambda c: not is_given(c, path),
        "must be given",
        f"The policy {policy} needs it",
        fix=f"{path}={example}",
        when=lambda c: c.activation_checkpoint.name == policy,
    )
    yield Row(
        path,
        lambda c: is_given(c, path),
        f"belongs to activation_checkpoint={policy}",
        "The policy {activation_checkpoint.name} has no use for it",
        fix=f"{path}=null",
        value=lambda c: _shown(value_at(c, path)),
        when=lambda c: c.activation_checkpoint.name in others,
    )


def _names_operators(config: RunConfig) -> bool:
    return config.activation_checkpoint.save_ops is not None


def _shown(value: object) -> object:
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else value


MEMORY: Table[RunConfig] = Table(
    "Activations",
    (
        *(row for key, (policy, example) in _OPTIONS.items() for row in _of_policy(key, policy, example)),
        at_least("activation_checkpoint.every", 1),
        *where(
            lambda c: is_given(c, "activation_checkpoint.save_ops"), one_of("activation_checkpoint.save_ops", SAVE_OPS)
        ),
        Row(
            "activation_checkpoint.layers",
            lambda c: c.activation_checkpoint.layers == [],
            "must name at least one layer",
            fix="activation_checkpoint=none",
            value=lambda c: "[]",
        ),
        one_of("offload.activations", _OFFLOADED_ACTIVATIONS),
        Row(
            "offload.activations",
            lambda c: c.activation_checkpoint.name == "selective" and c.offload.activations == "save_on_cpu",
            "must not meet activation_checkpoint=selective",
            "The hooks that move saved tensors do not see what a selective policy keeps: it would stay on the device",
            fix="activation_checkpoint=full or offload=none",
        ),
        Row(
            "compile",
            lambda c: c.activation_checkpoint.name == "selective" and c.compile,
            "must be false with activation_checkpoint=selective",
            "It keeps the outputs of single operators, and a compiled layer has none that it could see",
            fix="activation_checkpoint=full or compile=false",
        ),
    ),
)
