"""One stage under DeepSpeed's ZeRO optimizer, which takes over the engine's backwards and update.

DeepSpeed's engine provides hooks on the weights' gradients, buckets, partitions and offload. Accumulation, scaling, the
check for overflows and the learning rate stay with the runner: ``gradient_accumulation_steps`` is 1, the accumulation
boundary is set by hand, and gradients are divided once, by the loss scale of DeepSpeed's step.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runner.engine.transport.base import Handle, Transport
from runner.engine.update.gradients import StageGradients
from runner.model.layers import StageModule
from runner.model.tags import ParameterTag
from runner.optim.operators import load_operators, needed_operators
from runner.optim.states.whole_norms import part_of
from runner.strategy.zero.drive import SwapFolder, checked_writes, given_format
from runner.strategy.zero.flat_pieces import pieces
from runner.strategy.zero.twin_flow import TwinFlow

__all__ = ["STAGE_3", "DeepSpeedGradients", "DeepSpeedStage", "StageGroups", "import_deepspeed", "start_deepspeed"]

STAGE_3 = 3
_SWAP_BUFFERS = 5  # offload_config.py: buffer_count of offload_param
_SUB_GROUP = 1_000_000_000  # elements; zero/config.py: sub_group_size
_MEASURED_BACKWARDS = 8  # after this many backwards, the gradients have reached their largest size

# Attributes of DeepSpeed's optimizers that hold tensors between steps: of ZeRO 1 and 2, then of ZeRO 3.
_HELD = (
    *("bit16_groups_flat", "single_partition_of_fp32_groups", "param_buffer_of_bit16_for_cpu_offload_groups"),
    *("temp_grad_buffer_for_cpu_offload", "temp_grad_buffer_for_gpu_offload"),
    *("lp_param_buffer", "param_groups_fp16_flat_cpu_memory", "fp32_partitioned_groups_flat"),
    "grad_partitions_flat_buffer",
)


class StageGroups:
    """Process groups in DeepSpeed's terms: a stage's replicas are data parallel, all ranks of one are model parallel.

    Every rank must construct it with the same arguments (it makes process groups).

    Args:
        replicas: for every position in the pipeline and part of its layers, the global ranks that hold the same.
        models: for every replica, the global ranks of its pipeline and of all parts.
        timeout: longest wait for a message.
    """

    def __init__(self, replicas: Sequence[Sequence[int]], models: Sequence[Sequence[int]], timeout: timedelta) -> None:
        self._data = _own_group(replicas, timeout)
        self._model = _own_group(models, timeout)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._data)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._model)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._model)


def start_deepspeed(device: torch.device, settings: Mapping[str, Any], local_rank: int) -> Any:
    """Initialise DeepSpeed for this device on top of torch.distributed; a single rank gets its own group.

    Args:
        settings: DeepSpeed's configuration; the compiled operators that it needs are loaded.
    """
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    if not dist.is_initialized():
        from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in its __all__

        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    deepspeed = import_deepspeed(device.type)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    load_operators(needed_operators(settings), accelerator=device.type)
    return deepspeed


def import_deepspeed(device_type: str) -> Any:
    """Import DeepSpeed, which takes seconds, for ``cpu`` or ``cuda``, and limit its log to errors."""
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Raised by its collectives.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # An operator for inference, which training does not need but every rank would compile and load.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon()
    return deepspeed


def _import_muon() -> None:
    """Import DeepSpeed's Muon module, which every ZeRO optimizer imports, without torch's compiler.

    Three decorators in that module import the whole compiler: two seconds and 45 MB in each rank.
    """
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    except ImportError:  # another release of DeepSpeed; ZeRO imports the module itself if it needs it
        pass
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before


class DeepSpeedGradients(StageGradients):
    """ZeRO stage 0: one stage's gradients in the engine's own buffers, which DeepSpeed sums over the replicas.

    Nothing is summed before :meth:`attach`.
    """

    def __init__(self, parameters: Sequence[tuple[str, Parameter]], tag: ParameterTag | None = None) -> None:
        super().__init__(parameters, tag)
        self._engine: Any = None

    def attach(
        self, deepspeed: Any, module: StageModule, optimizer: Optimizer, settings: Any, groups: StageGroups | None
    ) -> None:
        self._engine = _initialize(deepspeed, module, optimizer, settings, groups)

    def start_sum(self, transport: Transport, group: Sequence[int]) -> list[Handle]:
        if self._engine is not None:
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.allreduce_gradients()
        return []


class DeepSpeedStage:
    """A :class:`runner.engine.update.sharding.Sharding` by DeepSpeed's ZeRO 1, 2 or 3.

    Before :meth:`attach` it is the plain stage.

    Args:
        module: the stage.
        settings: DeepSpeed's configuration.
        replicas: number of ranks that hold this stage.
        is_first_shard: whether this rank is the first of those that divide its layers: it counts whole weights.
    """

    def __init__(
        self, module: StageModule, settings: Mapping[str, Any], replicas: int, *, is_first_shard: bool = True
    ) -> None:
        self.module = module
        self.settings = dict(settings)
        self.stage: int = settings["zero_optimization"]["stage"]
        self.engine: Any = None
        self.replicas = replicas
        self._is_first_shard = is_first_shard
        self.twin = self._twin_flow()
        self._drive: SwapFolder | None = None
        self.most_gradient_bytes = 0
        self._left = 0
        self._unmeasured = _MEASURED_BACKWARDS

    def attach(self, deepspeed: Any, optimizer: Optimizer, groups: StageGroups | None) -> None:
        """Hand the stage's weights and their optimizer over to DeepSpeed. Every rank must call it.

        Args:
            optimizer: over the stage's weights; its parameter groups are kept, so that schedulers can still set their
                rate.
        """
        if groups is not None:
            self._mark()
        self._limit_bucket()
        self._limit_swap_buffers()
        with self._own_drive():
            self.engine = _initialize(deepspeed, self.module, optimizer, self.settings, groups)
        if self.twin is not None:
            self.twin.attach(self.optimizer)
        if self.stage == 1:
            self._count_before_reduction()
        if hasattr(optimizer, "follow"):  # 8-bit blocks must be those of the whole parameters
            for flat, parts in pieces(self.optimizer, self.stage):
                optimizer.follow(flat, parts)

    def _mark(self) -> None:
        """Say which weights DeepSpeed's norm includes: those of every stage; whole ones of divided layers once."""
        for parameter in self.module.parameters():
            given: Any = parameter
            counts = self._is_first_shard or part_of(parameter) is not None
            given.model_parallel = counts
            given.ds_pipe_replicated = not counts

    def _twin_flow(self) -> TwinFlow | None:
        zero = self.settings["zero_optimization"]
        offload = zero.get("offload_optimizer", {})
        if "ratio" not in offload:
            return None
        twin = TwinFlow(
            [parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad], offload["ratio"]
        )
        self.settings["zero_optimization"] = zero | {"offload_optimizer": offload | {"ratio": twin.ratio_of_groups}}
        return twin

    def _limit_bucket(self) -> None:
        """Limit the bucket size to all gradients, because DeepSpeed allocates a whole bucket."""
        zero = dict(self.settings["zero_optimization"])
        trained = sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)
        zero["reduce_bucket_size"] = max(1, min(zero.get("reduce_bucket_size", 500_000_000), trained))
        self.settings["zero_optimization"] = zero

    def _limit_swap_buffers(self) -> None:
        """Weights on a drive get buffers that are not larger than needed, and all of them leave the host's memory.

        DeepSpeed would take five buffers of a hundred million elements, and swap only what is beyond a billion.
        """
        zero = dict(self.settings["zero_optimization"])
        asked = zero.get("offload_param", {})
        if asked.get("device") != "nvme":
            return
        shards = [-(-parameter.numel() // self.replicas) for parameter in self.module.parameters()]
        at_once = max(len(list(module.parameters(recurse=False))) for module in self.module.modules())
        are_states_there = zero.get("offload_optimizer", {}).get("device") == "nvme"
        # Where states are on a drive, too, their first files are written from a whole group of weights.
        size = (
            min(sum(shards), zero.get("sub_group_size", _SUB_GROUP) + max(shards)) if are_states_there else max(shards)
        )
        limits = {"buffer_size": size, "buffer_count": max(_SWAP_BUFFERS, at_once), "max_in_cpu": 0}
        zero["offload_param"] = limits | asked
        self.settings["zero_optimization"] = zero

    @contextmanager
    def _own_drive(self) -> Iterator[None]:
        """What is swapped to a drive goes to a folder of this rank's own, through writes that are checked."""
        zero = dict(self.settings["zero_optimization"])
        swapped = [part for part in ("offload_optimizer", "offload_param") if "nvme_path" in zero.get(part, {})]
        if not swapped:
            yield
            return
        self._drive = SwapFolder(Path(zero[swapped[0]]["nvme_path"]))
        zero |= {part: zero[part] | {"nvme_path": str(self._drive.path)} for part in swapped}
        self.settings["zero_optimization"] = zero
        from deepspeed.ops.op_builder import AsyncIOBuilder

        with checked_writes(AsyncIOBuilder().load(verbose=False)), given_format():
            yield

    def tensors(self) -> list[Tensor]:
        """Tensors that DeepSpeed holds between steps, without optimizer states."""
        found = [getattr(self.optimizer, name, None) for name in _HELD]
        listed = [tensor for value in found for tensor in (value if isinstance(value, list) else [value])]
        buckets = [bucket.buffer for bucket in self.optimizer.ipg_buckets.values()]  # those of ZeRO 3 are permanent
        shards = [getattr(parameter, "ds_tensor", None) for parameter in self.module.parameters()]
        held = [tensor for tensor in (*listed, *shards, *buckets, *self._swap_buffers()) if isinstance(tensor, Tensor)]
        return held + [tensor.grad for tensor in held if tensor.is_leaf and tensor.grad is not None]

    @property
    def is_swapped(self) -> bool:
        """Whether states or weights go to a drive."""
        return self._drive is not None

    def _swap_buffers(self) -> list[Tensor]:
        """The host's memory through which states and weights go to a drive and come back."""
        states: Any = getattr(self.optimizer, "optimizer_swapper", None)
        weights: Any = next((p.nvme_swapper for p in self.module.parameters() if hasattr(p, "nvme_swapper")), None)
        found: list[Tensor] = [] if states is None else list(states.swap_buffer_manager.all_buffers)
        if weights is not None:
            found += [each for each in (weights.buffers, weights.partitioned_swap_buffer) if each is not None]
        return found

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer."""
        return self.engine.optimizer

    def forward(self, value: Any, before_layer: Callable[[int], None] | None) -> Any:
        if self.engine is None:
            return self.module(value, before_layer)
        return self.engine(value, before_layer)

    def begin(self, backwards: int) -> None:
        self._left = backwards

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
        self._left -= 1
        self.optimizer.clear_backward_seen_flag()  # forwards of other micro-batches may have run since
        self.engine.set_gradient_accumulation_boundary(self._left == 0)
        torch.autograd.backward(roots, gradients)
        # After the last backward, some gradients exist twice.
        if self._unmeasured and (self._left or not self.most_gradient_bytes):
            self._unmeasured -= 1
            held = sum(tensor.nbytes for tensor in self.gradient_tensors())
            self.most_gradient_bytes = max(self.most_gradient_bytes, held)

    def _count_before_reduction(self) -> None:
        """Count gradients just before ZeRO 1 reduces them, at the end of the last backward, when they are largest."""
        reduce = self.optimizer.reduce_gradients

        def counting(*args: Any, **keys: Any) -> None:
            held = sum(tensor.nbytes for tensor in self._whole_gradients())
            self.most_gradient_bytes = max(self.most_gradient_bytes, held)
            reduce(*args, **keys)

        self.optimizer.reduce_gradients = counting

    def _own_gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def _whole_gradients(self) -> list[Tensor]:
        """The gradients of weights, except those that are views of a bucket."""
        return [one for one in self._own_gradients() if one.untyped_storage().nbytes() == one.nbytes]

    def gradient_tensors(self) -> list[Tensor]:
        """Gradients that exist now: those of weights and their partitions, without buckets."""
        optimizer = self.optimizer
        if self.stage == STAGE_3:
            return [*self._own_gradients(), optimizer.grad_partitions_flat_buffer]
        whole = self._whole_gradients()
        # It reduces after the last backward, so the partitions still belong to an earlier step.
        if self.stage == 1 and self._left:
            return whole
        partitions = [part for group in optimizer.averaged_gradients.values() for part in group or ()]
        return [*whole, *(part for part in partitions if part is not None)]

    def bucket_tensors(self) -> list[Tensor]:
        """The buckets in which gradients are collected for their reduction."""
        buffers = [bucket.buffer for bucket in self.optimizer.ipg_buckets.values()]
        listed = [tensor for value in buffers for tensor in (value if isinstance(value, list) else [value])]
        return [tensor for tensor in listed if isinstance(tensor, Tensor)]

    def are_finite(self) -> bool:
        return not self.optimizer.has_overflow(partition_gradients=True)

    def divide_at_update(self, divisor: float) -> None:
        # DeepSpeed's gradients are means over the replicas; the rest of the division is given to it as its loss scale.
        self.optimizer.override_loss_scale(divisor / self.replicas)

    def step(self) -> None:
        """Update the stage's weights."""
        if self.twin is not None:
            self.twin.follow()
        self.optimizer.step()
        self.optimizer.custom_loss_scaler = False  # DeepSpeed must not scale backwards by it

    def norm(self) -> float | None:
        if not self.settings["gradient_clipping"]:
            return None
        return float(self.optimizer._global_grad_norm)

    def discard(self, *, applied: bool) -> None:
        optimizer = self.optimizer
        optimizer.clear_backward_seen_flag()
        optimizer.zero_grad(set_to_none=True)
        if self.stage == STAGE_3:
            optimizer.micro_step_id = 0
            return
        optimizer.micro_step_id = -1
        for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for group in gradients:
                gradients[group] = None
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            if not applied:  # several windows that were measured look to it like micro-batches, whose sums it keeps
                optimizer.accumulated_grads_in_cpu.clear()


def _initialize(
    deepspeed: Any, module: StageModule, optimizer: Optimizer, settings: Any, groups: StageGroups | None
) -> Any:
    """Make DeepSpeed's engine for a stage."""
    deepspeed.utils.groups.mpu = groups  # otherwise an earlier engine's groups would be used
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=dict(settings), mpu=groups, dist_init_required=False
    )
    return engine


def _own_group(groups: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup:
    made = [dist.new_group(list(ranks), timeout) for ranks in groups]
    own: dist.ProcessGroup | int = next(
        group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks
    )
    assert not isinstance(own, int), "a rank of the group gets it"
    return own
