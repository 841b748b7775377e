"""How far ahead of a stage's newest weights its forwards and backwards are computed, in optimizer steps of the stage.

In an asynchronous schedule, the gradient of a micro-batch updates weights that are some steps newer than those which
its forward has read. A prediction of weights that far ahead lets the forward use, about, the weights that its gradient
will update. Published systems have formulas for this gap; without one, it follows from the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from runner.schedule.stream import updates
from runner.schedule.values import Action, Op, Schedule

__all__ = ["PRESETS", "GapPreset", "StageGaps", "copies_held", "forwards_read_newest"]


@dataclass(frozen=True, slots=True)
class StageGaps:
    """The gaps of one stage.

    Args:
        forward: number of steps ahead at which forwards are computed; None: the steps that the stage will have made
            before the step of the micro-batch's window.
        backward: number of steps ahead at which backwards are computed, seen from the weights that are the newest when
            they run; None: backwards use the weights that their forward has used.
        once: whether a window's first micro-batch predicts for all micro-batches of its window, once before its forward
            and once before its backward.
        goes_back: whether backwards go back by the steps that the stage has made since the micro-batch's forward;
            ``backward`` is then 0.
    """

    forward: float | None = None
    backward: float | None = 0
    once: bool = False
    goes_back: bool = False


@dataclass(frozen=True, slots=True)
class GapPreset:
    """The published gaps of one system.

    Args:
        name: what ``weight_prediction.preset`` calls them.
        source: where they come from.
        of_stage: takes the number of ranks, the stage, and the number of micro-batches of an optimizer step.
    """

    name: str
    source: str
    of_stage: Callable[[int, int, int], StageGaps]


def _spectrain(ranks: int, stage: int, microbatches: int) -> StageGaps:
    return StageGaps(forward=stage // 2 + ranks - stage - 1, backward=stage // 2)


def _pipeoptim(ranks: int, stage: int, microbatches: int) -> StageGaps:
    return StageGaps(forward=ranks - stage - 1)


def _xpipe(ranks: int, stage: int, microbatches: int) -> StageGaps:
    forward = round((ranks + microbatches - stage / 2 - 2) / microbatches)
    return StageGaps(forward, backward=round((microbatches + stage // 2 - 1) / microbatches), once=True)


PRESETS: Mapping[str, GapPreset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            GapPreset("spectrain", "Chen et al., SpecTrain, 2018, as two ports of it compute them", _spectrain),
            GapPreset("pipeoptim", "Guan et al., PipeOptim, as its README says", _pipeoptim),
            GapPreset("xpipe", "Guan et al., XPipe, 2019, from notes that quote it; Python's rounding", _xpipe),
        )
    }
)
"""The published gaps by name."""


def forwards_read_newest(schedule: Schedule) -> bool:
    """Whether every forward reads the newest weights that its stage has when it runs."""
    return all(
        newest == schedule.version_read(action.stage, action.microbatch)
        for rank in range(schedule.ranks)
        for action, newest in _with_newest(schedule, rank)
        if action.op is Op.F and action.microbatch is not None
    )


def copies_held(schedule: Schedule, stage: int, gaps: StageGaps) -> int:
    """The number of copies of a stage's weights that its predictions need, besides the newest weights.

    Where backwards use the weights of their forward, each distinct prediction is kept until the step of its window.
    Otherwise one copy is filled before each forward and backward; two more keep what is predicted once in a window.
    """
    if gaps.backward is not None:
        return 3 if gaps.once else 1
    if not schedule.is_asynchronous:
        return 1
    held: set[tuple[int, int]] = set()  # the newest version at the forward, and the window
    most = 0
    rank = schedule.placement[0][stage]
    for action, newest in _with_newest(schedule, rank):
        if action.stage == stage and action.op is Op.F:
            held = {(version, window) for version, window in held if window >= newest}
            held.add((newest, schedule.window_at(action)))
            most = max(most, len(held))
    return most


def _with_newest(schedule: Schedule, rank: int) -> Iterator[tuple[Action, int]]:
    """Yield each compute action of a rank with the newest version of its stage's weights at that time."""
    steps = sorted(updates(schedule)[rank], key=lambda step: step[2])
    newest = dict.fromkeys(schedule.stages_of(rank), 0)
    for index, action in enumerate(schedule.compute[rank]):
        while steps and steps[0][2] <= index:
            stage, window, _ = steps.pop(0)
            newest[stage] = window + 1
        yield action, newest[action.stage]
