"""What a run says of its plan before the first step: what it learns otherwise, and what does not pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from runner.config.schema import RunConfig
from runner.profile import ModelProfile
from runner.schedule.values import Schedule

__all__ = ["Caution", "approximations", "lost_states", "told"]

_MOST = 3
_OTHER = "it learns otherwise than one process, and may need another learning rate"


About = Literal["learning", "checkpoints", "pipeline", "cores", "devices", "host"]
_ORDER = get_args(About)  # the most important first


class Caution(NamedTuple):
    """A note of a plan that a run repeats when it starts.

    Args:
        about: what it concerns: what is learned, what a resume does not find, the choice of a pipeline, cores that
            ranks share, devices that are emulated, moves to the host.
        line: the note.
    """

    about: About
    line: str


def told(cautions: Sequence[Caution]) -> list[str]:
    """The notes as a run says them, in three lines at most, the most important first."""
    lines = [each.line for each in sorted(cautions, key=lambda each: _ORDER.index(each.about))]
    if len(lines) > _MOST:
        lines[_MOST - 1 :] = [f"{len(lines) - _MOST + 1} more notes: `runner plan` with the same request has them"]
    return [f"note: {line}" for line in lines]


def lost_states(profile: ModelProfile) -> Iterator[str]:
    """Yield what forwards change and no checkpoint holds, so that a resumed run is another one."""
    names = [*profile.unsaved_buffers, *(each.name for each in profile.changed_states if not each.weight)]
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        yield (
            f"a forward changes {names[0]}{more}, which no checkpoint holds: a resumed run begins with it as it is "
            "made. register_buffer(name, tensor) would keep it"
        )


def approximations(config: RunConfig, schedule: Schedule) -> Iterator[str]:
    """Yield by what the request does not compute what one process computes without it.

    Args:
        config: the request.
        schedule: the schedule of its plan.
    """
    if schedule.own_weights:
        yield f"{schedule.name}: each pipeline trains weights of its own, which an average draws together; {_OTHER}"
    elif late := _late_steps(config, schedule):
        yield f"{schedule.name}: forwards read weights that lack up to {late} step{'s' if late > 1 else ''}; {_OTHER}"
    if config.compression.name != "none" and config.parallelism.data > 1:
        yield f"compression={config.compression.name}: replicas sum gradients that have lost a part; {_OTHER}"
    if config.approximate_backward.name != "none":
        yield f"approximate_backward={config.approximate_backward.name}: gradients are estimates; {_OTHER}"
    own = [name for name, each in config.callbacks.items() if not each.target.startswith(("lightning.", "runner."))]
    if config.partition.migrate is not None and own:
        yield (
            f"partition.migrate: parameters that callbacks.{own[0]} keeps are another rank's once their layer has "
            "moved; pl_module.parameters() has those of now"
        )


def _late_steps(config: RunConfig, schedule: Schedule) -> int:
    """The most optimizer steps, of this pipeline or of another worker, that a forward's weights lack."""
    own = -(-max(schedule.lags, default=0) // schedule.window_size)
    of_others = schedule.wave * (1 + schedule.distance) - 1 if config.parallelism.data > 1 else 0
    return max(own, of_others)
