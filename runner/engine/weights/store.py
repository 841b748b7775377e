"""Keeps the versions of one stage's weights that will still be read.

Version v is the result of v optimizer steps. The optimizer always updates the stage's own parameters, which are the
newest version. A window that reads another version gets a *leaf set*: separate parameters that share the memory of the
stage's parameters as long as these have that version. Before a step changes a version that a later window reads, the
stage's parameters move to other memory, and the leaf set keeps the old memory. So no tensor that autograd saved in a
forward changes before its backward, and no more memory is held than there are versions.

Gradients of all versions are added to the same buffers: the gradients of one window are complete, and used, before
those of the next window begin.

A stage whose windows all read the newest version needs no store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from runner.model.layers import StageModule

__all__ = ["WeightStore"]

LeafSet = dict[Parameter, Parameter]
"""Maps each of the stage's parameters to the one that replaces it."""


class WeightStore:
    """Keeps the weights of one stage by version.

    Args:
        module: the stage, which owns the newest version.
        delay: number of optimizer steps: window w reads version w - delay, or the first version if that is later.
        newest: the version that the stage's parameters have.
    """

    def __init__(self, module: StageModule, delay: int, newest: int = 0) -> None:
        self._module = module
        self._delay = delay
        self._places = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._leaves: dict[int, LeafSet] = {}
        self.start_at(newest)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are held, in ascending order; the last one is the newest."""
        return (*sorted(version for version in self._leaves if version != self.newest), self.newest)

    def start_at(self, version: int) -> None:
        """Set the version of the stage's parameters, and drop all others; it is read instead of older ones."""
        self.newest = self._first = version
        self._leaves.clear()

    def version_of(self, window: int) -> int:
        """The version that a window reads."""
        return max(self._first, window - self._delay)

    @contextmanager
    def leased(self, window: int) -> Iterator[None]:
        """Within the context, the parameters of the stage's modules are the weights that ``window`` reads."""
        leaves = self._leaf_set(self.version_of(window))
        for owner, name, parameter in self._places:
            _put(owner, name, leaves.get(parameter, parameter))
        try:
            yield
        finally:
            for owner, name, parameter in self._places:
                _put(owner, name, parameter)

    def before_step(self, window: int) -> None:
        """Prepare the optimizer step of ``window``; its gradients are complete, and it reads no weights any more.

        Versions that no later window reads are dropped. If a later window reads the newest version, it is kept separate
        from the memory that the step changes.
        """
        needed = self.version_of(window + 1)
        spare = [self._leaves.pop(version) for version in sorted(self._leaves) if version < needed]
        if self.newest < needed:
            return
        self._leaf_set(self.newest)
        with torch.no_grad():
            for parameter in self._trained:
                parameter.data = self._copied(parameter, spare)

    def after_step(self) -> None:
        """Count the version after a step, which may have been skipped: the parameters have the next version."""
        self.newest += 1

    def older(self) -> dict[int, dict[str, Tensor]]:
        """All versions except the newest, by global parameter names, for a checkpoint."""
        names = {parameter: self._module.global_name(name) for name, parameter in self._module.named_parameters()}
        return {
            version: {names[own]: leaf.detach() for own, leaf in self._leaves[version].items()}
            for version in self.versions[:-1]
        }

    def load_older(self, newest: int, versions: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Load the result of :meth:`older`; the stage's parameters have version ``newest``.

        Raises:
            KeyError: a weight of this stage is missing.
        """
        self.start_at(newest)
        for version, values in versions.items():
            leaves = self._leaf_set(version)
            for name, parameter in self._module.named_parameters():
                if parameter in leaves:
                    leaves[parameter].data = values[self._module.global_name(name)].to(parameter).clone()
        self._first = min([newest, *versions])

    def _leaf_set(self, version: int) -> LeafSet:
        """The leaf set of a version; a new one shares the memory of the stage's parameters."""
        if version not in self._leaves:
            self._leaves[version] = {parameter: _leaf(parameter) for parameter in self._trained}
        return self._leaves[version]

    @staticmethod
    def _copied(parameter: Parameter, spare: list[LeafSet]) -> Tensor:
        """A copy of a parameter's values, in the memory of a dropped version if there is one."""
        if spare:
            memory = spare[0][parameter].data
            return memory.copy_(parameter.data)
        return parameter.data.clone()


def _leaf(parameter: Parameter) -> Parameter:
    """A parameter that shares another one's memory and adds to its gradient."""
    leaf = Parameter(parameter.data)
    leaf.grad = parameter.grad
    return leaf


def _put(owner: nn.Module, name: str, parameter: Parameter) -> None:
    if type(owner).__setattr__ is nn.Module.__setattr__:
        owner._parameters[name] = parameter
    else:  # a recurrent layer also keeps a list of its weights
        setattr(owner, name, parameter)
