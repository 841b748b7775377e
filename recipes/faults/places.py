"""The places of a run at which a fault can be injected, as functions that are wrapped from outside.

A place is reached again and again; a fault names which time, so that it can be repeated. Times are counted in each
process from the fault before, or from the process's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from runner.recipes.faults.layouts import LAYOUTS, Layout

__all__ = ["PLACES", "Part", "Place", "places_of"]


class Part(IntEnum):
    """The part of a run to which a place belongs. Faults are injected in this order, so that each can be reached."""

    START = 0
    STEPS = 1
    END = 2


@dataclass(frozen=True, slots=True)
class Place:
    """A place.

    Args:
        name: as a table shows it. Its first word is the kind of place: action, hook, call, or phase.
        role: the process: ``command``, ``template``, ``rank`` or ``worker``, which is a loader's.
        part: when it is reached.
        most: the largest number of times that is asked for, so that a run of few steps reaches it.
        target: ``module:name`` of the function that is wrapped; empty if something else knows the place.
    """

    name: str
    role: str
    part: Part
    most: int = 1
    target: str = ""

    @property
    def kind(self) -> str:
        return self.name.partition(" ")[0]


_START = "runner.launch.start"
_TRAIN = "runner.training.run"
_OPS = tuple(dict.fromkeys(op for layout in LAYOUTS.values() for op in layout.actions))
_ONCE_A_STEP = {"STEP": 4, "REDUCE": 4}
_HOOKS = {
    Part.START: ("setup", "on_fit_start", "on_train_start"),
    Part.STEPS: (
        *("on_train_batch_start", "on_train_epoch_start", "on_train_batch_end", "on_save_checkpoint"),
        *("on_validation_start", "on_validation_batch_end", "on_validation_end"),
    ),
    Part.END: ("on_train_end", "on_fit_end", "teardown"),
}
_OFTEN = {"on_train_batch_start": 4, "on_train_batch_end": 4, "on_save_checkpoint": 2, "on_validation_batch_end": 2}
_CALLS = {"open": 12, "write": 16, "fsync": 8, "replace": 4}  # how often a rank makes them in some steps
_CALLS_OF_COMMAND = {"open": 8, "write": 4, "fsync": 6, "replace": 3}

PLACES = {
    place.name: place
    for place in (
        Place("phase template", "command", Part.START, target=f"{_START}:import_ahead"),
        Place("phase plan", "command", Part.START, target=f"{_START}:prepare"),
        Place("phase directory", "command", Part.START, target=f"{_START}:take_directory"),
        Place("phase request", "command", Part.START, target=f"{_START}:write_request"),
        Place("phase ranks", "command", Part.START, target=f"{_START}:run_ranks"),
        Place("phase poll", "command", Part.STEPS, 30, target="runner.launch.processes.supervise:_end_overdue"),
        Place("phase outcome", "command", Part.END, target="runner.launch.local.ranks:_outcome"),
        Place("phase table", "command", Part.END, target=f"{_START}:show"),
        Place("phase import", "template", Part.START, target="runner.launch.local.template:import_all"),
        Place("phase fork", "template", Part.START, target="runner.launch.local.template:_is_alone"),
        Place("phase rank", "rank", Part.START),
        Place("phase parts", "rank", Part.START, target=f"{_TRAIN}:load_parts"),
        Place("phase rehearsal", "rank", Part.START, target=f"{_TRAIN}:_predict"),
        Place("phase save", "rank", Part.STEPS, 2, target="lightning.pytorch.trainer.trainer:Trainer.save_checkpoint"),
        Place("phase finish", "rank", Part.END, target=f"{_TRAIN}:finish"),
        Place("phase exit", "rank", Part.END, target="runner.launch.rank:leave"),
        Place("phase sample", "worker", Part.STEPS, 40, target="runner.recipes.faults.job:Noisy.__getitem__"),
        *(Place(f"action {op}", "rank", Part.STEPS, _ONCE_A_STEP.get(op, 12)) for op in _OPS),
        *(Place(f"hook {name}", "rank", part, _OFTEN.get(name, 1)) for part, names in _HOOKS.items() for name in names),
        *(Place(f"call {name}", "rank", Part.STEPS, most) for name, most in _CALLS.items()),
        *(
            Place(f"call {name} of the command", "command", Part.START, most)
            for name, most in _CALLS_OF_COMMAND.items()
        ),
    )
}
"""All places by name."""


def places_of(layout: Layout) -> list[Place]:
    """The places that a layout has."""
    return [place for place in PLACES.values() if _has(layout, place)]


def _has(layout: Layout, place: Place) -> bool:
    if place.kind == "action":
        return place.name.removeprefix("action ") in layout.actions
    if place.role == "worker":
        return layout.workers
    return place.role != "template" or layout.ranks > 1
