"""What a rank's memory needs depend on besides the layers and the schedule: updates, sharing, and copies."""

from __future__ import annotations

from dataclasses import dataclass

from runner.plan.memory.extra import ExtraCopies
from runner.plan.memory.zero import ZeroSharing

__all__ = ["MemoryNeeds"]


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Inputs of a memory prediction besides the layers and the schedule.

    Args:
        batch_samples: number of samples of one optimizer step on one replica.
        temporaries, lingering: see :class:`runner.optim.catalogue.kind.OptimizerKind`; by default those of Adam and
            similar optimizers.
        in_any_order: whether any two weights may be updated one after the other, and not only neighbours in the model.
        whole_temporaries: how many of these are as large as a whole matrix where ranks divide it, too.
        norm_copies: while the norm of gradients is taken, how many times the bytes of one gradient exist beside it, in
            float64; 0 if the norm is not taken.
        at_once: bytes that an update makes and drops for each byte of the gradients of all stages of a rank.
        sharing: how ZeRO shards weights, gradients and states over replicas; None if each replica holds all of them.
        states_over: number of replicas over which only the optimizer's states are sharded, one of them too; None if
            they are not, so that weights are updated one by one.
        averages: bytes of averaged weights per byte of gradient, which are not sharded.
        flattened: largest number of bytes of gradients that are copied into one tensor to be reduced.
        accelerated: whether the device has its own memory, separate from the host's.
        extra: for each stage, what is held of its weights besides the newest ones; empty: the older versions that the
            schedule reads.
        backup: whether each rank keeps a copy of its weights and optimizer states, for post-validation.
        copied_by: number of replicas that share a copy of each stage's weights and states in the host's memory while
            they save it in the background; None if checkpoints are not saved in the background.
    """

    batch_samples: int
    temporaries: int = 2
    lingering: int = 0
    in_any_order: bool = False
    whole_temporaries: int = 0
    norm_copies: int = 0
    at_once: float = 0.0
    sharing: ZeroSharing | None = None
    states_over: int | None = None
    averages: float = 0.0
    flattened: int = 0
    accelerated: bool = True
    extra: tuple[ExtraCopies, ...] = ()
    backup: bool = False
    copied_by: int | None = None
