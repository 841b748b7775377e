"""Notes about what a plan moves to the host's memory, and what that costs."""

from __future__ import annotations

from runner.config.units import format_bytes, format_seconds
from runner.plan.draft.draft import Draft
from runner.plan.draft.stages import Stages
from runner.plan.values import TimePrediction

__all__ = ["host_notes", "idle_offload_notes"]

_SHORTEST_WAIT = 1e-9  # seconds; less is the rounding of sums


def host_notes(draft: Draft, stages: Stages, time: TimePrediction, moved: float) -> tuple[str, ...]:
    """Notes about activations and weights that are in the host's memory.

    Args:
        draft, stages, time: the plan so far.
        moved: bytes of activations that go there in a step.
    """
    return (*_activation_notes(draft, moved, time), *_swap_notes(draft, stages, time))


def idle_offload_notes(draft: Draft) -> tuple[str, ...]:
    """A note that states or weights which ZeRO moves to the host leave nothing where the host is the device."""
    offload = draft.config.offload
    moved = [f"offload.{part}=cpu" for part in ("optimizer", "parameters") if getattr(offload, part) == "cpu"]
    if not moved or draft.needs.accelerated:
        return ()
    return (
        f"{' '.join(moved)}: the device is the CPU, so that nothing leaves its memory, and the copies that a move "
        "takes come on top",
    )


def _activation_notes(draft: Draft, moved: float, time: TimePrediction) -> tuple[str, ...]:
    """A note about the activations that are in the host's memory for a time."""
    name = draft.config.offload.activations
    if not moved:
        return ()
    waits = _host_waits(draft, time)
    lines = [
        f"offload.activations={name}: {format_bytes(round(moved))} of activations a step go to the host's memory and "
        f"as many come back; {waits}"
    ]
    if not draft.needs.accelerated:
        lines.append(
            f"offload.activations={name}: on the CPU they stay in this machine's memory, which no limit counts"
        )
    return tuple(lines)


def _swap_notes(draft: Draft, stages: Stages, time: TimePrediction) -> tuple[str, ...]:
    """Notes about the weights that are at home in the host's memory."""
    name = draft.config.offload.weights
    if not stages.turns:
        return () if name == "none" else (f"offload.weights={name}: everything fits, and no weights move",)
    layers = [sum(unit.last - unit.first + 1 for unit in units) for units in stages.weights.stages]
    home = format_bytes(sum(figures.home_bytes for figures in stages.figures))
    fetched = format_bytes(sum(rank.traffic.weights for rank in stages.turns))
    sent = format_bytes(sum(rank.traffic.gradients for rank in stages.turns))
    waits = _host_waits(draft, time)
    lines = [
        f"offload.weights={name}: weights of {', '.join(map(str, layers))} layers of the stages, {home} with gradients "
        f"and states, are at home in the host's memory; {fetched} of weights come a step, and {sent} of gradients go; "
        f"{waits}"
    ]
    if not draft.needs.accelerated:
        lines.append(f"offload.weights={name}: on the CPU they stay in this machine's memory, which no limit counts")
    return tuple(lines)


def _host_waits(draft: Draft, time: TimePrediction) -> str:
    if not time.host_seconds:
        return "the measured seconds contain what waits for them"
    if draft.host_link.bytes_per_second is None:
        return "the host link's speed is not known, they count as free: set hardware.host_link_bytes_per_second"
    waits = max(time.host_seconds)
    if waits < _SHORTEST_WAIT:
        return "no compute waits for them"
    return f"a rank's computes wait up to {format_seconds(waits)} for them"
