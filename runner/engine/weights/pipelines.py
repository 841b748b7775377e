"""Keeps the weights of parallel pipelines that train each their own, beside the average of these weights.

The stage's own parameters are the average, which validations and files use. Each pipeline has a leaf set with memory of
its own; the gradients of its micro-batches are added to its own buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from runner.engine.update.gradients import StageGradients
from runner.engine.weights.store import LeafSet, StageWeights
from runner.model.layers import StageModule
from runner.model.tags import ParameterTag

__all__ = ["PipelineGradients", "PipelineWeights"]


class PipelineWeights(StageWeights):
    """The weights of one stage in each pipeline.

    Args:
        module: the stage, whose parameters are the average.
        pipeline_of: for each micro-batch of a window, its pipeline.
    """

    def __init__(self, module: StageModule, pipeline_of: Sequence[int]) -> None:
        super().__init__(module)
        self.newest = 0
        self._pipeline_of = tuple(pipeline_of)
        self._leaves: list[LeafSet] = [
            {parameter: Parameter(parameter.data.clone()) for parameter in self._trained}
            for _ in range(max(pipeline_of) + 1)
        ]

    @property
    @override
    def held(self) -> Sequence[Tensor]:
        return [leaf.data for leaves in self._leaves for leaf in leaves.values()]

    @override
    @torch.no_grad()
    def start_at(self, version: int) -> None:
        """Set the number of steps that have been made, and all pipelines' weights to the average."""
        self.newest = version
        for leaves in self._leaves:
            for average, leaf in leaves.items():
                leaf.copy_(average)

    @override
    def leased(self, window: int, number: int = 0, *, backward: bool = False) -> AbstractContextManager[None]:
        return self._lent(self._leaves[self._pipeline_of[number]])

    @override
    def before_step(self, window: int) -> None:
        """Do nothing: no micro-batch is under way."""

    @override
    def after_step(self) -> None:
        self.newest += 1

    def copies_of(self, average: Parameter) -> list[Parameter]:
        """The weight of each pipeline."""
        return [leaves[average] for leaves in self._leaves]

    def share(self, copies: Mapping[Tensor, Sequence[Parameter]]) -> None:
        """Let the pipelines' weights and an optimizer's own parameters share their memory and gradients.

        The memory is the optimizer's, because its states show these weights, too.

        Args:
            copies: for each average, the optimizer's parameter of each pipeline.
        """
        for average in self._trained:
            for leaf, parameter in zip(self.copies_of(average), copies[average], strict=True):
                parameter.data.copy_(leaf.data)
                leaf.data, parameter.grad = parameter.data, leaf.grad


class PipelineGradients(StageGradients):
    """The gradients of the weights of all pipelines of one stage, each over its own micro-batches.

    Args:
        parameters, tag: see :class:`runner.engine.update.gradients.StageGradients`; they are those of the averages.
        store: the weights of the pipelines.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, Parameter]], tag: ParameterTag | None, store: PipelineWeights
    ) -> None:
        pairs = [(name, store.copies_of(average)) for name, average in parameters]
        self._pipes = max((len(copies) for _, copies in pairs), default=1)
        super().__init__([(name, copies[pipe]) for pipe in range(self._pipes) for name, copies in pairs], tag)

    @override
    def divide(self, weight: float) -> None:
        """Turn sums into means over the micro-batches of each pipeline, which has one of ``pipes`` parts of them."""
        super().divide(weight / self._pipes)
