"""Bytes of one stage's weights, gradients and optimizer states under ZeRO, on the device, the host and the drive.

The formulas follow what DeepSpeed 0.19.8 allocates: flat buffers padded for the partitions, a partition of the weights
that the optimizer updates (a copy, even if it has the format of the weights), and buckets to reduce gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from runner.config.precision import weight_widths
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import optimizer_of
from runner.plan.memory.weight_places import WeightPlaces, weight_places
from runner.plan.stages.figures import StageFigures
from runner.plan.values import StateBytes
from runner.profile import ModelProfile

__all__ = [
    "FLATTENED",
    "MOST_GATHERED",
    "ZeroSharing",
    "averages_per_gradient_byte",
    "flattened_bytes",
    "sharing_of",
]

_FP32 = 4
_ALIGNED = 2  # elements; stage_1_and_2.py: nccl_start_alignment_factor
MOST_GATHERED = 1_000_000_000  # elements; stage3_max_live_parameters
FLATTENED = 500_000_000  # elements; engine.py: MEMORY_OPT_ALLREDUCE_SIZE
_STATE_BUFFERS = 4  # offload_config.py: buffer_count of offload_optimizer
_WEIGHT_BUFFERS = 5  # and of offload_param
_NORM_BYTES = 8  # stage_1_and_2.py: norm_for_param_grads, one of each weight until the update
_LEAST_SWAPPED = 2**20  # bytes; swap_tensor/utils.py: MIN_SWAPPABLE_BYTES


@dataclass(frozen=True, slots=True)
class ZeroSharing:
    """How ZeRO shards the weights, gradients and states of a stage over its replicas.

    Args:
        stage: ZeRO's stage: 1, 2 or 3.
        replicas: number of replicas that hold the stage.
        optimizer, parameters: where states and weights are offloaded: none, cpu or nvme.
        weight_width: bytes of an element of the weights.
        master_width: bytes of an element of the partition that the optimizer updates.
        states: number of the optimizer's values per element.
        bucket_elements: largest number of elements of gradients that are reduced at once.
        temporaries: number of temporary tensors, each as large as a partition, of one update.
        accumulates: whether a step has several micro-batches.
        delayed: whether the update works on copies of the weights and gradients.
        ratio: the part of offloaded states that leaves the device.
        masters: bytes of master weights among the profile's states, per byte of gradient, if the states are counted for
            each parameter (in blocks) and not as ``states`` values per element; otherwise None.
        constant_bytes: bytes of the optimizer's tables, which do not depend on the weights.
        averages: bytes of averaged weights per byte of gradient, which every replica has whole on its device.
        places: where the weights of the model lie; without it, partitions are taken to cut no weight.
    """

    stage: int
    replicas: int
    optimizer: str
    parameters: str
    weight_width: int
    master_width: int
    states: float
    bucket_elements: int
    temporaries: int
    accumulates: bool = False
    delayed: bool = False
    ratio: float = 1.0
    masters: float | None = None
    constant_bytes: int = 0
    averages: float = 0.0
    places: WeightPlaces = WeightPlaces()

    def held(self, figures: StageFigures) -> StateBytes:
        """The bytes that are held between steps."""
        found = self._shared_out(figures)
        return replace(found, optimizer=found.optimizer + round(self.averages * figures.gradient_bytes))

    def _shared_out(self, figures: StageFigures) -> StateBytes:
        """The same without averaged weights."""
        part = self._partition(figures)
        kept = figures.weight_bytes - figures.gradient_bytes  # buffers and frozen weights
        copies = 2 if self.delayed else 0
        states = part * self.master_width * self.states
        if self.masters is not None:
            whole = self.masters + self.averages
            states = (figures.optimizer_bytes - whole * figures.gradient_bytes) / self.replicas
        updated = round(part * self.master_width * (1 + copies) + states) + self.constant_bytes
        if self.stage < 3:
            flat = part * self.replicas * self.weight_width
            bytes_of = StateBytes(weights=kept + flat, gradients=0, optimizer=updated, buffers=0)
            return bytes_of if self.optimizer == "none" else self._offloaded_12(bytes_of, figures, part)
        shares = part * self.weight_width
        bytes_of = StateBytes(
            weights=kept + shares,
            gradients=shares,
            optimizer=updated,
            buffers=self._bucket(figures) * self.weight_width,
        )
        return self._offloaded_3(bytes_of, figures, part)

    def between_backwards(self, figures: StageFigures) -> StateBytes:
        """The bytes that are held between two backwards, or before a reduction: with gradients, without a bucket."""
        held = self.held(figures)
        gradients = held.gradients
        if self.stage < 3 and self.optimizer == "none":
            kept_wide = self.weight_width != self.master_width  # each gradient is at once added to one in fp32
            whole = self.stage == 1 and (self.accumulates or not kept_wide)
            gradients = figures.gradient_bytes if whole else self._partition(figures) * self.weight_width
        return replace(held, gradients=gradients, buffers=0)

    def in_backward(self, figures: StageFigures) -> StageFigures:
        """The figures if a backward keeps the gradients that it makes, as that of ZeRO 1 does of a step's only one."""
        if self._keeps_gradients and not self.accumulates:
            return replace(figures, later_backward_peak_bytes=figures.growing_backward_peak_bytes)
        return figures

    @property
    def _keeps_gradients(self) -> bool:
        """Whether whole gradients are kept until the reduction, and not sums in fp32 beside weights in fewer bits."""
        return self.stage == 1 and self.optimizer == "none" and self.weight_width == self.master_width

    def backward_extra(self, figures: StageFigures, replica: int | None = None) -> StateBytes:
        """The bytes that the last backward of a replica needs beside :meth:`held` and its activations.

        None stands for the replica that needs most.
        """
        last = self.reduction_extra(figures, replica)
        bucket = self._bucket(figures) * self.weight_width
        if self._keeps_gradients:  # those of earlier micro-batches are held from the start
            return StateBytes(0, figures.gradient_bytes if self.accumulates else 0, 0, bucket)
        if self.stage == 3 or bucket < figures.gradient_bytes:
            return last  # the first bucket is copied and reduced while activations are held
        if self.stage == 1 and self.accumulates:
            return last
        earlier = self._earlier(figures, replica)
        if self.stage == 1:
            earlier = figures.largest_parameter_bytes  # gradients replace activations, but the first may be larger
        return StateBytes(0, min(earlier, last.gradients + bucket), 0, bucket)

    def with_gradients(self, extra: StateBytes) -> StateBytes:
        """The part of :meth:`backward_extra` that is not there before a backward makes its first gradient of a weight.

        Buckets are made when they are first filled, and let go when they are reduced: by ZeRO 1 after the last of
        several micro-batches. Weights that ZeRO 3 has gathered for the forward may be there all the time.
        """
        if self.stage == 1 and self.accumulates:
            return StateBytes(0, 0, 0, 0)
        return StateBytes(0, 0 if self.accumulates or self.stage == 3 else extra.gradients, 0, extra.buffers)

    def reduction_extra(self, figures: StageFigures, replica: int | None = None) -> StateBytes:
        """The further bytes at the end of the last backward, when all gradients exist and nothing is updated yet."""
        bucket = self._bucket(figures) * self.weight_width
        if self._keeps_gradients:
            return StateBytes(0, self._reduced_in_turn(figures, replica), 0, bucket)
        if self.stage < 3:
            # The last bucket and its flat copy, beside the reduced gradients of other buckets and micro-batches.
            is_last = bucket >= figures.gradient_bytes  # there are no others
            own = 0 if self.optimizer != "none" or is_last else self._touched(figures, replica)
            unreduced = figures.gradient_bytes if self.stage == 1 and self.accumulates else 0
            return StateBytes(0, max(unreduced - bucket, own + self._earlier(figures, replica)), 0, 2 * bucket)
        elements = figures.gradient_bytes // self.weight_width
        return StateBytes(min(elements, MOST_GATHERED) * self.weight_width, 0, 0, bucket)

    def _reduced_in_turn(self, figures: StageFigures, replica: int | None) -> int:
        """The most bytes beside a bucket while ZeRO 1 moves gradients into it, weight by weight from the first.

        A full bucket is reduced, and its gradients of the replica's own part are kept beside it, in memory for all of
        them. Where it has parts of several weights, or for several replicas, a copy is reduced. A gradient that is
        larger than a bucket is reduced where it is.
        """
        if not figures.gradient_bytes:
            return 0
        if replica is None:
            return max(self._reduced_in_turn(figures, each) for each in range(self.replicas))
        room, part, width = self._bucket(figures), self._partition(figures), self.weight_width
        left = peak = figures.gradient_bytes
        kept = 0
        sizes = self.places.sizes(figures.first, figures.last) or (left // width,)
        for bucket in _filled_in_turn(sizes, room):
            in_place = bucket[-1][1] - bucket[-1][0] > room
            start, end = bucket[0][0], bucket[-1][1]
            moved = width * (end - start)
            is_copied = len(bucket) > 1 or start // part != (end - 1) // part
            left -= 0 if in_place else moved
            peak = max(peak, left + kept + (moved if is_copied else 0))
            if start < (replica + 1) * part and end > replica * part:
                kept = self._touched(figures, replica)
                peak = max(peak, left + kept)
                left -= moved if in_place else 0
        return peak

    def _earlier(self, figures: StageFigures, replica: int | None) -> int:
        """The bytes of gradients of earlier micro-batches that stage 2 has reduced."""
        kept = self.stage == 2 and self.accumulates and self.optimizer == "none"
        return self._touched(figures, replica) if kept else 0

    def _touched(self, figures: StageFigures, replica: int | None) -> int:
        """The bytes of gradients of all weights that a replica's partition touches.

        Reduced gradients are kept whole (stage_1_and_2.py: grads_in_partition), also those of which the partition has
        only a part.
        """
        part = self._partition(figures)
        replicas = range(self.replicas) if replica is None else (replica,)
        touched = (self.places.touched(figures.first, figures.last, at * part, (at + 1) * part) for at in replicas)
        return max(part, *touched) * self.weight_width

    def update_extra(self, figures: StageFigures) -> int:
        """The further bytes on the device, beside :meth:`held`, while the optimizer updates."""
        part = self._partition(figures)
        if self.optimizer != "none":
            return self._temporary_bytes(figures) if self.ratio < 1 else 0
        gradients = part * (self.weight_width if self.stage < 3 else 0)
        return max(gradients, part * self.master_width) + self.temporaries * part * self.master_width

    def update_extra_host(self, figures: StageFigures) -> int:
        """The further bytes in the host's memory while the optimizer updates there; 0 without offload."""
        return 0 if self.optimizer == "none" else self._temporary_bytes(figures)

    def _temporary_bytes(self, figures: StageFigures) -> int:
        """The bytes of temporary tensors of one call of the optimizer.

        A call updates a whole partition or, if only a part of the states is offloaded, the own part of one weight.
        """
        largest = -(-figures.largest_parameter_bytes // (self.weight_width * self.replicas))
        return self.temporaries * (self._partition(figures) if self.ratio == 1 else largest) * self.master_width

    def _partition(self, figures: StageFigures) -> int:
        """The number of elements of one replica's part, padded."""
        elements = figures.gradient_bytes // self.weight_width
        aligned = self.replicas * (_ALIGNED if self.stage < 3 else 1)
        return -(-elements // aligned) * aligned // self.replicas

    def _bucket(self, figures: StageFigures) -> int:
        return min(self.bucket_elements, figures.gradient_bytes // self.weight_width)

    def _offloaded_12(self, held: StateBytes, figures: StageFigures, part: int) -> StateBytes:
        """Move states, their gradients, and weights and gradients on their way, to the host (stages 1 and 2)."""
        largest = figures.largest_parameter_bytes
        # Stage 2 brings the sums of each micro-batch: those of a weight that the partition shares come whole.
        coming = self._touched(figures, None) if self.stage == 2 and self.accumulates else 0
        host = held.optimizer + part * (self.master_width + self.weight_width) + coming + largest
        norms = _NORM_BYTES * self.places.count(figures.first, figures.last)
        return StateBytes(held.weights, 0, 0, largest + norms, host=host)

    def _offloaded_3(self, held: StateBytes, figures: StageFigures, part: int) -> StateBytes:
        """Move states with their gradients, and weights, to the host or to a drive (stage 3)."""
        updated, shares = part * self.master_width, part * self.weight_width
        weights, gradients, optimizer, host, drive = held.weights, held.gradients, held.optimizer, 0, 0
        if self.optimizer == "nvme" and updated >= _LEAST_SWAPPED:
            host += gradients + _STATE_BUFFERS * updated
            drive += optimizer + updated
            gradients, optimizer = 0, 0
        elif self.optimizer != "none":
            moved = round(optimizer * self.ratio)
            host += gradients + round(updated * self.ratio) + moved
            gradients, optimizer = round(updated * (1 - self.ratio)), optimizer - moved
        if self.parameters == "nvme":
            largest = -(-figures.largest_parameter_bytes // self.replicas)
            # One weight is read while those before it are gathered; whole weights are written back after the update.
            weights += figures.largest_parameter_bytes - shares
            host += _WEIGHT_BUFFERS * (shares if self.optimizer == "nvme" else largest) + self.replicas * shares
            drive += shares
        elif self.parameters != "none":
            weights -= shares
            host += shares
        return StateBytes(weights, gradients, optimizer, held.buffers, host=host, drive=drive)


def _filled_in_turn(sizes: Sequence[int], room: int) -> Iterator[list[tuple[int, int]]]:
    """Buckets of weights, each with its first element and the one after its last; one that is larger is alone."""
    bucket: list[tuple[int, int]] = []
    start = 0
    for size in sizes:
        if bucket and start + size - bucket[0][0] > room:
            yield bucket
            bucket = []
        bucket.append((start, start + size))
        start += size
    if bucket:
        yield bucket


def flattened_bytes(config: RunConfig) -> int:
    """The largest number of bytes of gradients that stage 0 copies into one tensor; 0 for the other stages."""
    return FLATTENED * weight_widths(config)[0] if config.zero.stage == 0 else 0


def averages_per_gradient_byte(config: RunConfig) -> float:
    """The bytes of averaged weights, which are in fp32, per byte of gradient."""
    return _FP32 / weight_widths(config)[0] if config.trainer.ema_decay is not None else 0.0


def sharing_of(config: RunConfig, profile: ModelProfile, temporaries: int) -> ZeroSharing | None:
    """How the replicas of a request shard their states under ZeRO; None if each replica holds everything."""
    if not config.zero.stage:
        return None
    width, master = weight_widths(config)
    kind = optimizer_of(config.optimizer)
    # The profile counts masters and averages among the states, and each state with the width of its weight.
    averages = averages_per_gradient_byte(config)
    values = profile.optimizer_bytes_per_gradient_byte - profile.master_bytes_per_gradient_byte - averages
    return ZeroSharing(
        stage=config.zero.stage,
        replicas=config.parallelism.data,
        optimizer=config.offload.optimizer,
        parameters=config.offload.parameters,
        weight_width=width,
        master_width=master,
        states=values * width / master,
        bucket_elements=config.zero.bucket_elements,
        temporaries=temporaries,
        accumulates=config.schedule.microbatches > 1,
        delayed=config.offload.delay_from is not None,
        ratio=config.offload.ratio,
        masters=profile.master_bytes_per_gradient_byte if kind.state_bytes is not None else None,
        constant_bytes=kind.constant_bytes,
        averages=averages,
        places=weight_places(profile, width),
    )
