"""The plain loop where pipelines train weights of their own: each micro-batch uses those of its pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.nn import Parameter

from runner.optim.states.elastic import ElasticAverage

__all__ = ["ReferencePipelines"]


class ReferencePipelines:
    """Takes the place of :class:`runner.training.verify.reference_versions.ReferenceVersions`.

    Args:
        optimizer: holds the weights of each pipeline; the model's are their average.
    """

    def __init__(self, optimizer: ElasticAverage) -> None:
        self._optimizer = optimizer
        self._pipes = [
            dict(zip(optimizer.copies, own, strict=True)) for own in zip(*optimizer.copies.values(), strict=True)
        ]

    @property
    def count(self) -> int:
        """The number of pipelines."""
        return len(self._pipes)

    @property
    def trained(self) -> Sequence[Parameter]:
        """The weights of all pipelines, whose gradients the optimizer uses."""
        return [weight for own in self._pipes for weight in own.values()]

    @contextmanager
    def read(self, number: int) -> Iterator[Callable[[], None]]:
        """Within it, the model has the weights of the pipeline of micro-batch ``number``, which gets the gradients."""
        own = self._pipes[number % self.count]
        averages = {average: average.data for average in own}
        for average, weight in own.items():
            average.data, average.grad = weight.data, weight.grad
        try:
            yield lambda: None
        finally:
            for average, weight in own.items():
                weight.grad, average.grad = average.grad, None
                average.data = averages[average]

    def step(self) -> None:
        """Make the optimizer's step."""
        self._optimizer.step()

    def stepped(self) -> None:
        """Do nothing: no older weights are read."""
