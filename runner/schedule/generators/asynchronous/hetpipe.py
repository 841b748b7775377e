"""HetPipe: virtual workers, each an asynchronous pipeline, which exchange what waves of their steps have changed.

A virtual worker is a replica of the pipeline. A wave is N optimizer steps of it. Within the worker all stages of a
micro-batch read the same version, which lacks the last N - 1 steps of this worker, so that N steps are under way. At
the end of a wave, each stage sends the sum of the wave's changes to its replicas, and takes in those of the wave that
is ``distance`` waves older: see :mod:`runner.engine.update.waves`. With one stage there is no pipeline to fill, every
step reads the newest weights of its worker, and this is the plain parameter server: synchronous with a wave of one step
and no distance, stale otherwise.

Source: Park et al., "HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters", 2020; the wave and
its clocks are from excerpts of the paper. There, only a fast worker is as late as the bound allows; here every worker
is.
"""

from __future__ import annotations

from dataclasses import replace

from runner.errors import Problem
from runner.schedule.generators.asynchronous.streamed import streamed
from runner.schedule.generators.forms import whole_number
from runner.schedule.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPEC", "hetpipe"]


def hetpipe(ranks: int, microbatches: int, wave: int, distance: int = 0) -> Schedule:
    """Generate the stream of one worker.

    Args:
        ranks: D.
        microbatches: T, the number of each optimizer step.
        wave: N, the number of steps of a wave, at least :func:`_least_wave`.
        distance: number of waves by which a worker may lack the changes of others.
    """
    lag = (wave - 1) * microbatches if ranks > 1 else 0
    return replace(streamed("hetpipe", (1,) * ranks, microbatches, (lag,) * ranks), wave=wave, distance=distance)


def _least_wave(ranks: int, microbatches: int) -> int:
    """The fewest steps under way with which no forward waits for a step: the first rank makes D - 1 forwards ahead."""
    return 1 - (-(ranks - 1) // microbatches)


def _generate(request: ScheduleRequest) -> Schedule:
    least = _least_wave(request.ranks, request.microbatches)
    wave, distance = request.option("wave") or least, request.option("distance") or 0
    return hetpipe(request.ranks, request.microbatches, wave, distance)


def _problems(request: ScheduleRequest) -> list[Problem]:
    wave, least = request.option("wave"), _least_wave(request.ranks, request.microbatches)
    if wave is None or wave >= least:
        return []
    why = "A wave's steps are under way together, and their micro-batches must fill the pipeline"
    rule = "must be at least 1 + (D - 1) / T, rounded up"
    return [Problem("schedule.wave", wave, rule, why, f"schedule.wave={least}")]


_ELSEWHERE = "The replicas of the other schedules sum their gradients in every step"

SPEC = ScheduleSpec(
    name="hetpipe",
    position=260,
    description="workers that are asynchronous pipelines and exchange their changes once per wave of steps",
    summary="replicas, each a `pipedream_vsync` pipeline, that exchange what `schedule.wave` steps have changed "
    "instead of every gradient, `schedule.distance` waves late; several workers keep four more copies",
    source="Park et al., HetPipe, 2020, from excerpts",
    formulas=None,
    generate=_generate,
    one_rank=True,
    constraint=_problems,
    options=(
        whole_number(
            "wave",
            1,
            "steps from one exchange of workers to the next, which are under way together; null = as few as fill the "
            "pipeline",
            example=2,
            elsewhere=_ELSEWHERE,
            legal=(2, 4),
        ),
        whole_number(
            "distance",
            0,
            "waves by which a worker may lack the others' changes; null = 0",
            example=1,
            elsewhere=_ELSEWHERE,
            legal=(0, 1),
        ),
    ),
    kind="asynchronous",
    data_unit="mini-batch",
    searched=False,
)
