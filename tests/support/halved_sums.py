"""A toy compressor: replicas send gradients in bfloat16, and add what that left over to the next step's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from runner.config.rules.table import Row, Table
from runner.config.schema import CompressionConfig, RunConfig
from runner.engine.transport.base import Gathering, Handle, Transport
from runner.engine.update.gradients import StageGradients
from runner.engine.update.reducer import agree_on_finite
from runner.optim.catalogue.compression import CompressionKind
from runner.optim.catalogue.registry import OPTIMIZERS


class HalvedSums:
    """Keeps what is left over of each element, fp32, as one flat tensor for each of the stage's buffers."""

    def __init__(self, gradients: StageGradients, keep: bool) -> None:
        self._keep = keep
        self._left = [torch.zeros_like(flat, dtype=torch.float32) for flat in gradients.flats]
        self._by_name = _views(gradients, self._left)

    def start(self, gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
        if not agree_on_finite(gradients, transport, group):
            return []
        handles: list[Handle] = []
        for flat, left in zip(gradients.flats, self._left, strict=True):
            left += flat
            sent = left.to(torch.bfloat16)
            left -= sent.float()
            if not self._keep:
                left.zero_()
            handles.append(_Sum(flat, transport.start_all_gather(sent, group)))
        return handles

    def settle(self, applied: bool) -> None:
        """Do nothing: a step that is not finite on this stage has left no trace, and no other one is dropped here."""

    def state_dict(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {name: {"left": view} for name, view in self._by_name.items()} if self._keep else {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, view in self._by_name.items():
            view.copy_(state[name]["left"]) if name in state else view.zero_()


class _Sum:
    def __init__(self, flat: Tensor, gathering: Gathering) -> None:
        self._flat, self._gathering = flat, gathering

    def wait(self) -> None:
        first, *others = self._gathering.wait()
        self._flat.copy_(first)
        for each in others:
            self._flat += each

    def is_completed(self) -> bool:
        return False


def _views(gradients: StageGradients, flats: Sequence[Tensor]) -> dict[str, Tensor]:
    """Parts of ``flats`` that lie as the parameters' gradients do in theirs."""
    found: dict[str, Tensor] = {}
    for name, parameter in zip(gradients.names, gradients.parameters, strict=True):
        assert parameter.grad is not None
        place = parameter.grad.untyped_storage().data_ptr()
        whole = next(
            left for left, own in zip(flats, gradients.flats, strict=True) if own.untyped_storage().data_ptr() == place
        )
        found[name] = whole[parameter.grad.storage_offset() :][: parameter.numel()].view(parameter.shape)
    return found


def _make(section: CompressionConfig, gradients: StageGradients) -> HalvedSums:
    return HalvedSums(gradients, **KIND.settings(section))


KIND = CompressionKind(
    name="halves",
    description="gradients in bfloat16",
    make=_make,
    keys={"keep": True},
    bytes_sent=lambda wire: wire.gathered(2.0 * sum(wire.sizes)) + wire.summed(4),  # and whether all are finite
)


def by_function(gradients: StageGradients, keep: bool = True) -> HalvedSums:
    """The same as a user's function, which says nothing of itself."""
    return HalvedSums(gradients, keep)


_ONE_THREAD: Table[RunConfig] = Table(
    "One thread", (Row("trainer.threads", lambda c: c.trainer.threads != 1, "must be 1", fix="trainer.threads=1"),)
)
STRICT = replace(KIND, rules=(_ONE_THREAD,))
"""A compressor with a rule of its own."""

STRICT_OPTIMIZER = replace(OPTIMIZERS["sgd"], rules=(_ONE_THREAD,))
"""An optimizer with a rule of its own."""
