"""PipeMare's claim on the emoji model: its loss beside 1F1B's over several seeds, as runs of ``runner train``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from runner.recipes.asynchronous.schedules import drawn, state_bytes, steps_late, trained

__all__ = ["SEEDS", "VARIANTS", "Outcome", "rows", "run"]

SEEDS = (0, 1, 2)
_STAGES = 4
_WARM = 110
_ONE = ("schedule.microbatches=1",)

VARIANTS: dict[str, tuple[str, ...]] = {
    "1f1b": ("schedule=1f1b", "schedule.microbatches=4"),
    "pipemare": ("schedule=pipemare", *_ONE),
    f"pipemare, {_WARM} synchronous steps first": ("schedule=pipemare", *_ONE, f"schedule.warmup_steps={_WARM}"),
    "pipemare, four micro-batches per step": ("schedule=pipemare", "schedule.microbatches=4"),
}
"""What is compared; the first is what the others are compared with. All have the same samples in each step."""


@dataclass(frozen=True)
class Outcome:
    """One run.

    Args:
        label, seed: which.
        loss: mean training loss over the last fifth of the steps; None if it became infinite.
        val_loss: loss over the validation set after the last step; None likewise.
        idle: share of all rank time without work in the steady state, by the simulator, where a backward takes two
            forwards and all stages are equal.
        late: for each stage, the most optimizer steps that the weights of a forward lack.
        weight_bytes: of weights and what is kept of them between two steps, by rank: counted.
    """

    label: str
    seed: int
    loss: float | None
    val_loss: float | None
    idle: float | None
    late: Sequence[int]
    weight_bytes: Sequence[int]


def run(label: str, seed: int, steps: int, directory: Path) -> Outcome:
    """Train the emoji model on four stages with one of :data:`VARIANTS`.

    Args:
        label, seed: which.
        steps: optimizer steps; the learning rate's warm-up takes a tenth of them.
        directory: a folder for the run.
    """
    place = directory / f"{label}-{seed}".replace(", ", "-").replace(" ", "-")
    words = [
        "recipe=rudalle_tiny", "partition=uniform", f"parallelism.pipeline={_STAGES}", *VARIANTS[label],
        f"seed={seed}", f"trainer.max_steps={steps}", f"trainer.val_every={steps}", "report=null", "device=cpu",
        f"lr_scheduler.warmup_steps={steps // 10}", "logger=none", "trainer.progress=false", f"run_dir={place}",
    ]  # fmt: skip
    record, order = trained(words, place), drawn(words)
    losses = [loss for loss in record["loss"] if loss is not None and math.isfinite(loss)]
    ended = record["status"] == "ok" and len(losses) == steps
    return Outcome(
        label=label,
        seed=seed,
        loss=mean(losses[-max(1, steps // 5) :]) if ended else None,
        val_loss=record["val_loss"][-1][1] if ended else None,
        idle=order["steady_bubble_ratio"],
        late=steps_late(order),
        weight_bytes=[each["weights"] for each in state_bytes(record)[1]],
    )


def rows(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """A line for each variant: validation losses of its seeds, their mean, and how far it is from the first one's."""
    base = [each for each in outcomes if each.label == next(iter(VARIANTS))]
    for label in VARIANTS:
        own = [each for each in outcomes if each.label == label]
        if own:
            name, comma, how = label.partition(",")
            yield [f"`{name}`{comma}{how}", *_losses(own, base), *_pipeline(own[0], base)]


def _losses(own: Sequence[Outcome], base: Sequence[Outcome]) -> list[str]:
    seeds = " ".join("not finite" if each.val_loss is None else f"{each.val_loss:.3f}" for each in own)
    ours, theirs = ([each.val_loss for each in of if each.val_loss is not None] for of in (own, base))
    if len(ours) < 2 or len(theirs) < 2:
        return [seeds, "", ""]
    return [seeds, f"{mean(ours):.3f} ± {stdev(ours):.3f}", f"{mean(ours) - mean(theirs):+.3f}"]


def _pipeline(one: Outcome, base: Sequence[Outcome]) -> list[str]:
    """Steps late, utilisation of the steady state, and bytes of weights over those of the base."""
    ratio = f"{sum(one.weight_bytes) / sum(base[0].weight_bytes):.2f}" if base else ""
    busy = "" if one.idle is None else f"{1 - one.idle:.2f}"
    return [" ".join(map(str, one.late)), busy, ratio]
