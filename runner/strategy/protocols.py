"""The interfaces of a plan and of a LightningModule that the pipeline strategy uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from runner.memory.solve.values import ActivationPlan
from runner.model.data import LossFunction
from runner.model.layers import StageModule
from runner.model.ties import Tie
from runner.plan.cut.partition import Partition
from runner.plan.layout.topology import Topology
from runner.plan.prediction import Prediction
from runner.schedule.values import Program, Schedule

__all__ = ["Layout", "PipelineModule"]


@runtime_checkable
class PipelineModule(Protocol):
    """The interface that the strategy needs of a LightningModule."""

    loss_function: LossFunction
    ties: Sequence[Tie]

    def build_stages(self, partition: Sequence[tuple[int, int]], stages: Sequence[int]) -> Mapping[int, StageModule]:
        """Build the layers of ``stages`` and keep them as submodules; called before the optimizers are made.

        Where layers move while a run trains, it is called again after each move: layers that this rank has built
        before are then the same modules.
        """
        ...


class Layout(Protocol):
    """Says which rank computes what: the part of a plan that a strategy needs."""

    @property
    def topology(self) -> Topology: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def program(self) -> Program: ...

    @property
    def partition(self) -> Partition: ...

    @property
    def activations(self) -> ActivationPlan: ...

    @property
    def prediction(self) -> Prediction | None: ...
