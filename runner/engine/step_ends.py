"""The ends of one rank's optimizer steps, read from top to bottom: the sums, the agreement, the update.

At STEP of a stage the sums of its gradients over replicas must be there, and the window's loss over all replicas. Then
the stage's :class:`runner.engine.update.stage_update.StageUpdate` changes the weights or leaves them. With
post-validation the last step may be undone until :meth:`StepEnds.settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.nn import Parameter

from runner.engine.context import RankContext
from runner.engine.headers import Headers
from runner.engine.options import EngineOptions, FinishedStep, TakenBack
from runner.engine.stream import RankStream
from runner.engine.transport.base import Handle
from runner.engine.update.gradients import StageGradients
from runner.engine.update.sets import Keep, stage_sets, tied_sets
from runner.engine.update.sharding import ShardedUpdate
from runner.engine.update.stage_update import AroundStep, Backup, StageUpdate
from runner.engine.update.update import Update
from runner.engine.update.waves import WaveExchange
from runner.engine.weights.store import StageWeights
from runner.engine.window import Window
from runner.errors import Problem, RequestError
from runner.model.tags import ParameterTag, named_parameters
from runner.optim.compression.rounds import GradientStep

__all__ = ["StepEnds"]


class StepEnds:
    """Ends the steps of one rank, see the module's text.

    Args:
        rank: the place of the rank, its stages, and what the parts share.
        stream: the rank's actions.
        headers: sends the loss to the other ranks.
        options: the settings of the run.
        tags: describes each of the rank's parameters, by global name.
        keep: makes the gradients of a stage.
        stores: the weight store of each stage that keeps several versions of its weights.
        waves: the exchange of each stage whose replicas exchange changes of weights.

    Attributes:
        gradients: the gradients of each stage.
        tied_gradients: the gradients of weights that several stages hold; they belong to no stage's gradients.
        updating, updating_stages: the step whose update is being applied, and the stages that are updated.
        stop_after: the last step that is to begin, since a rank has asked to stop; None: no rank has.
        save_after: the last step that is to begin before a save for which a rank has asked; None: no rank has.
    """

    def __init__(
        self,
        rank: RankContext,
        stream: RankStream,
        headers: Headers,
        options: EngineOptions,
        *,
        tags: Mapping[str, ParameterTag],
        keep: Keep,
        stores: Mapping[int, StageWeights],
        waves: Mapping[int, WaveExchange],
    ) -> None:
        self.gradients = stage_sets(rank.stages, tags, keep)
        self.tied_gradients = tied_sets(rank.stages, tags)
        self.updating = 0
        self.updating_stages: frozenset[int] = frozenset()
        self.stop_after: int | None = None
        self.save_after: int | None = None
        self._rank, self._stream, self._headers = rank, stream, headers
        self._updates = _make_updates(
            self, rank, options, stream.schedule(training=True).is_asynchronous, stores, waves
        )
        self._frozen = {name: each for name, each in named_parameters(rank.stages).items() if not each.requires_grad}
        self._reductions: dict[int, list[Handle]] = {}
        self._seed = options.seed
        self._finished: list[FinishedStep] = []

    @property
    def all_gradients(self) -> list[StageGradients]:
        """All gradients of this rank: those of its stages, and those of weights that several stages hold."""
        return [*self.tied_gradients, *self.gradients.values()]

    @property
    def update(self) -> Update:
        """The update that scales this rank's losses and gradients."""
        return self._updates[0].update

    @property
    def taken_back(self) -> list[TakenBack]:
        """Steps that were reported and then undone; the reader may clear the list."""
        return self._updates[0].taken_back

    @property
    def is_pending(self) -> bool:
        """Whether the last step may still be undone; this is only so in flushed schedules, which have one update."""
        return self._updates[0].is_pending

    def attach_optimizer(
        self,
        apply_update: Callable[[], None],
        master_of: Callable[[Tensor], Parameter] | None,
        backup: Backup | None,
    ) -> None:
        """Set the function that updates the weights; see :meth:`runner.engine.engine.Engine.attach_optimizer`."""
        apply_update = self._at_speed(apply_update)
        for update in self._updates:
            others = [each for stage, each in self.gradients.items() if stage not in update.stages]
            update.update.attach(partial(_without, others, apply_update) if others else apply_update, master_of)
            update.backup = backup

    def _at_speed(self, apply_update: Callable[[], None]) -> Callable[[], None]:
        """The function that updates the weights, as slow as this rank's emulated device."""
        if self._rank.speed == 1:
            return apply_update

        def slowed() -> None:
            start = self._rank.timeline.moment()
            apply_update()
            self._rank.slow_down(start)

        return slowed

    def reduce(self, window: Window, stage: int) -> None:
        """Run REDUCE of a stage: start to sum its gradients over its replicas and twins; STEP waits for the sums."""
        of_step = GradientStep(window.step, self.update.scale.of_sum, self._seed)
        self._reductions[stage] = self.gradients[stage].reduce(self._rank.transport, of_step)

    def send_loss(self, window: Window) -> None:
        """Send the loss to the other ranks if all of it is known, unless it may have to be computed again."""
        if window.targets is not None and not (window.losses_to_come or window.is_told or self.is_pending):
            self._headers.send_totals(window)
            window.is_told = True

    def step(self, window: Window, stage: int) -> None:
        """Run STEP of a stage; stages that are updated together wait for the last of them.

        Raises:
            NotFiniteError: the step is not finite, or nothing in it counts, and it is not to be skipped.
            RequestError: a weight that was frozen when the run began is not frozen any more.
        """
        self._refuse_thawed()
        (update,) = (each for each in self._updates if stage in each.stages)
        window.waits_for_step.discard(stage)
        if window.waits_for_step & update.stages:
            return
        timeline = self._rank.timeline
        start = timeline.moment()
        self._wait_for_sums(window, update.stages)
        timeline.add("waited_at_step", start)
        self.updating, self.updating_stages = window.step, update.stages
        finished = update.finish(window, timeline)
        if not window.waits_for_step:
            self._finished.append(finished)
            if finished.stop and self.stop_after is None:
                self.stop_after = window.step + self._stream.overlap
            if finished.save:
                self.save_after = window.step + self._stream.overlap

    def _refuse_thawed(self) -> None:
        """Refuse weights that need gradients now and did not when their buffers, sums and states were laid out."""
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            rule = "must stay frozen in a run that began with it frozen"
            why = (
                "Something has set its requires_grad since, and its gradients have no place in sums, clipping and plan"
            )
            fix = (
                "a learning rate of 0 in a group of its own for as long as it rests, or a run that goes on with resume"
            )
            raise RequestError([Problem("model.target", thawed[0], rule, why, fix)])

    def settle(self, drop: Callable[[], None] | None = None) -> bool:
        """Wait until the last step can no longer be undone; undo and correct it if another rank's gradients say so.

        Args:
            drop: called before anything is undone: drops what the next window has begun.

        Returns:
            whether the step was undone, so that the beginning of the next window has to run again.

        Raises:
            NotFiniteError: the step is neither finite nor to be skipped.
        """
        return self._updates[0].settle(self._rank.timeline, drop)

    def close(self) -> None:
        """Drop the gradients of windows that have no STEP."""
        for update in self._updates:
            update.update.close()

    def take_finished(self) -> list[FinishedStep]:
        """The steps that have ended on this rank since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _wait_for_sums(self, window: Window, stages: frozenset[int]) -> None:
        """Wait for the window's loss over all replicas, and for the sums of the stages' gradients."""
        view, transport = self._rank.view, self._rank.transport
        reductions = [each for stage in sorted(stages) for each in self._reductions.pop(stage, ())]
        reductions += [each for group in self.tied_gradients for each in group.reduce(transport)]
        if not window.knows_totals:
            totals = self._headers.totals(window).to(transport.device)
            if not view.is_first_shard:
                window.forget_figures(totals)  # they are those of the first one
            if len(view.peers) > 1:
                reductions.append(transport.all_reduce(totals, view.peers))
        for handle in reductions:
            handle.wait()
        if not window.knows_totals:
            window.learn(totals)


def _make_updates(
    ends: StepEnds,
    rank: RankContext,
    options: EngineOptions,
    each_alone: bool,
    stores: Mapping[int, StageWeights],
    waves: Mapping[int, WaveExchange],
) -> list[StageUpdate]:
    """Make one update for all stages of the rank, or one for each stage if they are updated each alone."""

    def make(gradients: Sequence[StageGradients], pipeline: tuple[int, ...]) -> Update:
        return Update(
            gradients=gradients,
            pipeline=pipeline,
            transport=rank.transport,
            clip_norm=options.clip_norm,
            clip_value=options.clip_value,
            scaling=options.scaling,
        )

    if rank.sharding is not None:
        sharded = ShardedUpdate(rank.sharding, rank.transport, options.scaling)
        return [StageUpdate(rank.stages, options, sharded)]
    if not each_alone:
        together = make(ends.all_gradients, rank.view.judges)
        return [StageUpdate(rank.stages, options, together, stores.values())]
    return [
        StageUpdate([stage], options, make([gradients], rank.view.shards), _around_step(stage, stores, waves))
        for stage, gradients in ends.gradients.items()
    ]


def _around_step(stage: int, *kinds: Mapping[int, AroundStep]) -> list[AroundStep]:
    return [of_stage[stage] for of_stage in kinds if stage in of_stage]


def _without(others: Sequence[StageGradients], apply_update: Callable[[], None]) -> None:
    """Update the weights that have a gradient, except those of ``others``."""
    for gradients in others:
        gradients.release()
    apply_update()
    for gradients in others:
        gradients.claim()
