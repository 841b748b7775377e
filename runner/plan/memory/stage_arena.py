"""Says how large one piece of memory must be that holds everything that a stage saves and needs while it runs.

What is alive is followed layer by layer, as the prediction of the stage's peak does: so the most bytes that are alive
at once are this peak, but where that is the end of a backward, when gradients of unused inputs are made for its caller.
What a layer keeps is one tensor here, and so is what it needs while it runs. Micro-batches run as in that prediction:
forwards of as many as are in flight, and then backwards and forwards in turns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from runner.config.units import format_bytes
from runner.memory.solve.static_arena import ArenaFigures, lives_of
from runner.plan.stages.figures import StageFigures, held_output
from runner.plan.stages.on_the_way import OnTheWay
from runner.profile import LayerProfile, ModelProfile

__all__ = ["TURNS", "arena_notes", "stage_arena", "stage_moments"]

TURNS = 2  # micro-batches beyond those in flight, until what is on its way is the same for each

Held = dict[Hashable, int]
"""The bytes of each thing that is alive."""


def stage_arena(profile: ModelProfile, figures: StageFigures, in_flight: int) -> ArenaFigures:
    """The arena of a stage's saved tensors and temporaries, beside its bound and best fit.

    Args:
        profile: the model's profile with the costs of the stage's program.
        figures: the figures of the stage, from the same profile.
        in_flight: the largest number of micro-batches whose saved tensors are alive at once.
    """
    return ArenaFigures.of(lives_of(stage_moments(profile, figures, in_flight)))


def stage_moments(profile: ModelProfile, figures: StageFigures, in_flight: int) -> Iterator[Held]:
    """Yield what is alive, moment by moment; see :func:`stage_arena`."""
    is_last = figures.last == len(profile.layers) - 1
    rows = [*profile.layers[figures.first : figures.last + 1], *([profile.loss] if is_last else [])]
    stage = _Stage(rows, figures, 0 if is_last else held_output(rows[-1]))
    for turn in range(2 * in_flight + TURNS):
        first = max(0, turn - in_flight)
        beside = stage.kept(range(first + (turn >= in_flight), turn))
        if turn >= in_flight:
            yield from ({**beside, **held} for held in stage.backward(first))
        yield from ({**beside, **held} for held in stage.forward(turn))


def arena_notes(chooser: str, arenas: Sequence[ArenaFigures]) -> tuple[str, ...]:
    """A line about the largest arena of the stages; none without arenas.

    Args:
        chooser: the override that names the strategy.
        arenas: the arena of each stage.
    """
    if not arenas:
        return ()
    stage = max(range(len(arenas)), key=lambda each: arenas[each].arena_bytes)
    arena = arenas[stage]
    return (
        f"{chooser}: an arena of {format_bytes(arena.arena_bytes)} has a place for everything that stage {stage} saves "
        f"and needs; {format_bytes(arena.bound_bytes)} are alive at once, and best fit takes "
        f"{format_bytes(arena.best_fit_bytes)}; it is planned and not used, as torch's allocators take no addresses",
    )


class _Stage:
    """Follows what is alive of a stage.

    Args:
        rows: its layers, and the loss if it is the last stage.
        figures: its figures.
        output_bytes: the part of its output that it keeps until its backward ends.
    """

    def __init__(self, rows: Sequence[LayerProfile], figures: StageFigures, output_bytes: int) -> None:
        self._rows, self._moved, self._output_bytes = rows, figures.moved, output_bytes
        self._way = OnTheWay(figures.leaving_bytes)
        self._pending = figures.saved_bytes - sum(row.saved_bytes for row in rows)

    def kept(self, microbatches: Sequence[int]) -> Held:
        """What is kept of micro-batches between their forward and their backward."""
        kept: Held = {}
        for number in microbatches:
            kept |= {**self._saved(number, len(self._rows)), ("pending", number): self._pending}
        return kept

    def forward(self, number: int) -> Iterator[Held]:
        """Yield what is alive of a micro-batch while each layer runs forward, with what is on its way of all."""
        for at, on_the_way in self._way.forward_moments((0, number), self._moved) if self._moved else self._plain():
            row, freed = self._rows[at], self._rows[at].moves.freed_bytes
            yield {
                **self._saved(number, at + 1),
                **on_the_way,
                ("leaving", (0, number), at): freed,
                ("forward", number, at): row.forward_transient_bytes - freed,
            }

    def backward(self, number: int) -> Iterator[Held]:
        """Yield what is alive of a micro-batch before its backward, and while each layer runs backward."""
        if not self._moved:
            yield self.kept([number])
        moments = self._way.backward_moments((0, number), self._moved) if self._moved else reversed(self._plain())
        for at, on_the_way in moments:
            held = self._saved(number, at + 1) | on_the_way | {("pending", number): self._pending}
            if at < len(self._rows):
                held |= self._gradients(number, at)
            if at < len(self._rows) - 1:
                output = self._kept_output()
                held |= {("output", number): output, ("more of the output", number): self._output_bytes - output}
            yield held

    def _plain(self) -> list[tuple[int, Held]]:
        """The layers, with nothing on its way."""
        return [(at, {}) for at in range(len(self._rows))]

    def _saved(self, number: int, end: int) -> Held:
        """What the layers before ``end`` keep; the stage's output is apart."""
        saved: Held = {("saved", number, at): row.saved_bytes for at, row in enumerate(self._rows[:end])}
        if end >= len(self._rows):
            last = len(self._rows) - 1
            output = self._kept_output()
            saved |= {("saved", number, last): self._rows[last].saved_bytes - output, ("output", number): output}
        return saved

    def _kept_output(self) -> int:
        """The part of the stage's output that its last layer's saved bytes contain."""
        return min(self._output_bytes, self._rows[-1].saved_bytes)

    def _gradients(self, number: int, at: int) -> Held:
        """The gradient of a layer's output and that of its input, and what else the layer needs in its backward."""
        row, held = self._rows[at], Held()
        needed = row.backward_transient_bytes
        if at < len(self._rows) - 1:
            held["gradient", number, at] = row.gradient_of_output_bytes
            needed = row.inner_backward_bytes
        if at and self._rows[at - 1].gradient_of_output_bytes <= needed:
            held["gradient", number, at - 1] = self._rows[at - 1].gradient_of_output_bytes
            needed -= self._rows[at - 1].gradient_of_output_bytes
        return {**held, ("backward", number, at): needed}
