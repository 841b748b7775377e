"""What a request's activation policies do to its plan: the rules that need the model's layers, and what to tell."""

from __future__ import annotations

from collections.abc import Sequence

from runner.config.schema import RunConfig
from runner.config.units import format_bytes
from runner.errors import Problem
from runner.memory.solve.adjust import adjusted, host_bytes
from runner.memory.solve.policies import policy_problems, solve
from runner.memory.solve.values import ActivationPlan, PolicyOptions
from runner.profile import ModelProfile

__all__ = ["activation_notes", "activation_problems", "plan_activations"]

Partition = Sequence[tuple[int, int]]


def plan_activations(
    config: RunConfig, profile: ModelProfile, partition: Partition, *, on_accelerator: bool
) -> tuple[ActivationPlan, ModelProfile]:
    """The policies' plan for these stages, and the profile with its costs in it.

    On a CPU nothing that goes to the host's memory leaves the device, and the profile says so.
    """
    to_host = config.offload.activations == "save_on_cpu"
    plan = solve(profile, partition, _options(config), to_host=to_host)
    counted = plan if on_accelerator else ActivationPlan(plan.stages)
    return plan, adjusted(profile, counted)


def activation_problems(config: RunConfig, layer_names: Sequence[str]) -> list[Problem]:
    """Layers that a policy names and the model does not have."""
    return policy_problems(_options(config), layer_names)


def activation_notes(
    config: RunConfig, profile: ModelProfile, plan: ActivationPlan, in_flight: Sequence[int], *, on_accelerator: bool
) -> tuple[str, ...]:
    """What a reader of the plan should know of its figures."""
    notes = []
    if config.compile:
        notes.append("compile=true: bytes and seconds are those of layers that are not compiled, which save more")
    if plan.to_host and on_accelerator:
        sizes = [n * host_bytes(profile, stage) for n, stage in zip(in_flight, plan.stages, strict=True)]
        notes.append(
            f"offload.activations=save_on_cpu: up to {format_bytes(max(sizes))} of saved tensors of one stage wait in "
            "the host's memory; weights that autograd saves are copied besides; the copies' seconds are not in the step"
        )
    elif plan.to_host:
        notes.append(
            "offload.activations=save_on_cpu: the device is the CPU, so that nothing moves and no memory is saved"
        )
    return tuple(notes)


def _options(config: RunConfig) -> PolicyOptions:
    section = config.activation_checkpoint
    return PolicyOptions(
        name=section.name,
        every=section.every,
        save_ops=section.save_ops,
        layers=None if section.layers is None else tuple(section.layers),
    )
