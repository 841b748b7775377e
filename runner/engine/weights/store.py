"""Keeps the versions of one stage's weights that will still be read.

Version v is the result of v optimizer steps. The optimizer always updates the stage's own parameters, which are the
newest version. A micro-batch that reads another version gets a *leaf set*: separate parameters that share the memory of
the stage's parameters as long as these have that version. Before a step changes a version that a later micro-batch
reads, the stage's parameters move to other memory, and the leaf set keeps the old memory. So no tensor that autograd
saved in a forward changes before its backward, and no more memory is held than there are versions.

Where backwards read the newest weights, there is one leaf set, which always shares the memory of the stage's
parameters. Autograd does not see that an optimizer step changes this memory between a forward and its backward, so that
the backward computes with the new weights, and with the activations of the old ones.

Gradients of all versions are added to the same buffers: the gradients of one window are complete, and used, before
those of the next window begin.

A stage whose forwards all read the weights that their backwards read needs no store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from typing_extensions import override

from runner.model.layers import StageModule

__all__ = ["LeafSet", "StageWeights", "WeightStore", "new_leaf"]

LeafSet = dict[Parameter, Parameter]
"""Maps each of the stage's parameters to the one that replaces it."""


class StageWeights(ABC):
    """The weights that the forwards and backwards of one stage use instead of the newest ones.

    Args:
        module: the stage, which owns the newest weights.

    Attributes:
        newest: the version of the stage's parameters, which is the number of optimizer steps that have made them.
    """

    newest: int

    def __init__(self, module: StageModule) -> None:
        self._module = module
        self._places = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are held, in ascending order; the last one is the newest."""
        return (self.newest,)

    @property
    @abstractmethod
    def held(self) -> Sequence[Tensor]:
        """The weights that are held besides the newest ones; some may share memory with these."""

    @abstractmethod
    def start_at(self, version: int) -> None:
        """Set the version of the stage's parameters, and forget what was known of older ones."""

    @abstractmethod
    def leased(self, window: int, number: int = 0, *, backward: bool = False) -> AbstractContextManager[None]:
        """Within the context, the parameters of the stage's modules are the weights that a micro-batch uses.

        Args:
            window: the step of the micro-batch.
            number: its number in the window, from 0.
            backward: whether they are for its backward.
        """

    @abstractmethod
    def before_step(self, window: int) -> None:
        """Prepare the optimizer step of ``window``; its gradients are complete, and it reads no weights any more."""

    @abstractmethod
    def after_step(self) -> None:
        """Count the version after a step: the parameters have the next version."""

    def forget(self) -> None:  # noqa: B027 - most stages have nothing to forget
        """Drop what was made for micro-batches that will not be updated, e.g. in a rehearsal."""

    def older(self) -> dict[int, dict[str, Tensor]]:
        """The older weights that later steps read, by version and global parameter names, for a checkpoint."""
        return {}

    def load_older(self, newest: int, versions: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Load the result of :meth:`older`; the stage's parameters have version ``newest``."""
        self.start_at(newest)

    @contextmanager
    def _lent(self, leaves: LeafSet) -> Iterator[None]:
        """Within the context, ``leaves`` are the parameters of the stage's modules."""
        for owner, name, parameter in self._places:
            _put(owner, name, leaves.get(parameter, parameter))
        try:
            yield
        finally:
            for owner, name, parameter in self._places:
                _put(owner, name, parameter)


class WeightStore(StageWeights):
    """Keeps the weights of one stage by version.

    Args:
        module: the stage, which owns the newest version.
        lag, microbatches: micro-batch n of window w reads version w + (n - lag) // microbatches, or the first version
            if that is later; see :class:`runner.schedule.values.Schedule`.
        reads_newest: whether backwards read the weights that are the newest when they run, as forwards do.
        newest: the version that the stage's parameters have.
    """

    def __init__(
        self, module: StageModule, lag: int, microbatches: int, *, reads_newest: bool = False, newest: int = 0
    ) -> None:
        super().__init__(module)
        self._lag, self._microbatches = lag, microbatches
        self._reads_newest = reads_newest
        self._leaves: dict[int, LeafSet] = {}
        self.start_at(newest)

    @property
    @override
    def versions(self) -> tuple[int, ...]:
        return (*sorted(version for version in self._leaves if version != self.newest), self.newest)

    @property
    @override
    def held(self) -> Sequence[Tensor]:
        return [leaf.data for version in self.versions[:-1] for leaf in self._leaves[version].values()]

    @override
    def start_at(self, version: int) -> None:
        """Set the version of the stage's parameters, and drop all others; it is read instead of older ones."""
        self.newest = self._first = version
        self._leaves.clear()

    def version_of(self, window: int, number: int = 0) -> int:
        """The version that the micro-batch ``number`` of a window reads; numbers begin at 0."""
        if self._reads_newest:
            return self.newest
        return max(self._first, window + (number - self._lag) // self._microbatches)

    @override
    def leased(self, window: int, number: int = 0, *, backward: bool = False) -> AbstractContextManager[None]:
        return self._lent(self._leaf_set(self.version_of(window, number)))

    @override
    def before_step(self, window: int) -> None:
        """Prepare the optimizer step of ``window``; its gradients are complete, and it reads no weights any more.

        Versions that no later window reads are dropped. If a later window reads the newest version, it is kept separate
        from the memory that the step changes.
        """
        if self._reads_newest:
            return
        needed = self.version_of(window + 1)
        spare = [self._leaves.pop(version) for version in sorted(self._leaves) if version < needed]
        if self.newest < needed:
            return
        self._leaf_set(self.newest)
        with torch.no_grad():
            for parameter in self._trained:
                parameter.data = self._copied(parameter, spare)

    @override
    def after_step(self) -> None:
        """Count the version after a step, which may have been skipped: the parameters have the next version."""
        if self._reads_newest and self.newest in self._leaves:
            self._leaves = {self.newest + 1: self._leaves[self.newest]}
        self.newest += 1

    @override
    def older(self) -> dict[int, dict[str, Tensor]]:
        """All versions except the newest, by global parameter names, for a checkpoint."""
        names = {parameter: self._module.global_name(name) for name, parameter in self._module.named_parameters()}
        return {
            version: {names[own]: leaf.detach() for own, leaf in self._leaves[version].items()}
            for version in self.versions[:-1]
        }

    @override
    def load_older(self, newest: int, versions: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Load the result of :meth:`older`; the stage's parameters have version ``newest``.

        Stages hold different numbers of versions, so that a version may lack weights of this stage. Then it is left
        out, and the next version is read instead.
        """
        self.start_at(newest)
        if self._reads_newest:
            return
        names = {own: self._module.global_name(name) for name, own in self._module.named_parameters()}
        needed = {names[own] for own in self._trained}
        for version in sorted(version for version, values in versions.items() if needed <= values.keys()):
            for own, leaf in self._leaf_set(version).items():
                leaf.data = versions[version][names[own]].to(own).clone()
            self._first = min(self._first, version)

    def _leaf_set(self, version: int) -> LeafSet:
        """The leaf set of a version; a new one shares the memory of the stage's parameters."""
        if version not in self._leaves:
            self._leaves[version] = {parameter: new_leaf(parameter, parameter.data) for parameter in self._trained}
        return self._leaves[version]

    @staticmethod
    def _copied(parameter: Parameter, spare: list[LeafSet]) -> Tensor:
        """A copy of a parameter's values, in the memory of a dropped version if there is one."""
        if spare:
            memory = spare[0][parameter].data
            return memory.copy_(parameter.data)
        return parameter.data.clone()


def new_leaf(parameter: Parameter, values: Tensor) -> Parameter:
    """A parameter with the memory of ``values`` that adds to the gradient of another one."""
    leaf = Parameter(values)
    leaf.grad = parameter.grad
    return leaf


def _put(owner: nn.Module, name: str, parameter: Parameter) -> None:
    if type(owner).__setattr__ is nn.Module.__setattr__:
        owner._parameters[name] = parameter
    else:  # a recurrent layer also keeps a list of its weights
        setattr(owner, name, parameter)
