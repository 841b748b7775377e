"""The typed shape of a request: one dataclass per section, with units in the names or comments.

OmegaConf needs these classes to be mutable. The resolved configuration is still treated as a value: nothing changes it
after :func:`runner.config.compose.resolve.resolve`, and a run is based on the frozen plan.

The defaults here apply to a run that names its own model or data. Options of a group (``conf/<group>/<option>.yaml``)
fill a section; ``name`` is the name of the chosen option. ``runner COMMAND --help`` shows the comments beside the
fields. Below a field, ``# also:`` has the names that other tools have for it, which
:mod:`runner.config.compose.synonyms` explains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from runner.memory.solve.strategies import OPTIONS
from runner.memory.solve.weights import WEIGHT_STRATEGIES
from runner.options import Option, about
from runner.schedule.catalogue import registry as schedules

__all__ = [
    "ActivationCheckpointConfig",
    "AdapterConfig",
    "CallbackConfig",
    "CheckpointConfig",
    "ApproximateBackwardConfig",
    "CompressionConfig",
    "CostConfig",
    "DataConfig",
    "HardwareConfig",
    "KernelsConfig",
    "LauncherConfig",
    "LoggerConfig",
    "LossConfig",
    "LrSchedulerConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "PartitionConfig",
    "PlannerConfig",
    "PrecisionConfig",
    "ProfilerConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainerConfig",
    "TransportConfig",
    "WeightPredictionConfig",
    "ZeroConfig",
]


Section = TypeVar("Section")

WATCHDOG_MARGIN_SECONDS = 10.0
SERVICE_LOGGERS = ("wandb", "mlflow")  # each is named as the package that it needs
BESIDE = ("tensorboard", "csv", *SERVICE_LOGGERS)  # loggers that may stand beside another one


SUBSTITUTIONS = ("attention", "cancel_reshapes", "drop_identities", "fold_scales", "merge_linears", "one_hot")
"""What ``kernels.substitutions`` may name."""


def _with_options(options: Mapping[str, Mapping[str, Option]]) -> Callable[[type[Section]], type[Section]]:
    """Give a section the keys that its guests declare, null where they are not given."""

    def add(section: type[Section]) -> type[Section]:
        for key, owners in options.items():
            section.__annotations__[key] = next(iter(owners.values())).kind | None
            also = tuple(name for option in owners.values() for name in option.also)
            example = next(iter(owners.values())).example
            metadata = {"about": about(owners), "also": also, "example": example}
            setattr(section, key, field(default=None, metadata=metadata))
        return section

    return add


def _some_of(names: Sequence[str]) -> Any:
    """A list of some of these names, empty where it is not given."""
    return field(default_factory=list, metadata={"names": names})


@dataclass
class ModelConfig:
    """``target`` is ``package.module:function``; it is called with ``kwargs`` and returns the model."""

    name: str = "custom"
    target: str = "???"  # package.module:function that returns the model
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of target: model.kwargs.NAME=VALUE
    split_points: list[str] | None = None  # traced models: modules before which to cut; null = where it is best
    # also: pipeline_parallel_split_points
    needs: dict[str, str] = field(default_factory=dict)  # packages that its code imports, and what gets them from pip
    pretrained: str | None = None  # folder or safetensors file whose weights the run starts from; null = fresh weights
    # also: model_name_or_path, pretrained_model_name_or_path, base_model, initial_load_path
    pretrained_strict: bool = True  # false: tensors that the files lack stay fresh, and others there are passed over
    pretrained_names: str | None = None  # YAML file that maps names of the files to the model's names
    config_file: str | None = None  # file of a pretrained folder from which target reads what kwargs say otherwise
    # Options of other groups, used when the user names this model but not those groups.
    goes_with: dict[str, str] = field(default_factory=dict)


@dataclass
class AdapterConfig:
    """Small trained matrices beside the model's weights, which are frozen."""

    name: str = "none"
    rank: int = 8  # columns of the one and rows of the other matrix
    # also: lora_r, lora_rank, adapter.r
    alpha: float = 16.0  # their product is added with the factor alpha / rank
    # also: lora_alpha
    dropout: float = 0.0  # of the adapters' input
    # also: lora_dropout
    targets: list[str] = field(default_factory=list)  # ends of layers' names; empty = PEFT's for the architecture
    # also: lora_target_modules, target_modules


@dataclass
class EmbeddingConfig:
    """How tables are held: the model's own, or products of small cores."""

    name: str = "dense"
    rank: int = 16  # largest rank between two cores
    factors: int = 3  # the number of cores
    targets: list[str] = field(default_factory=list)  # patterns of layers' names; empty = every embedding that shrinks


@dataclass
class DataConfig:
    """``target`` returns a dataset of ``(input, target)``, or ``(train, val)`` or ``(train, val, test)`` of them."""

    name: str = "custom"
    target: str = "???"  # package.module:function that returns the dataset, or (train, val)
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of target: data.kwargs.NAME=VALUE
    batch_size: int = 32  # samples per optimizer step, over all ranks; plan and train: max = the most that fit
    # also: per_device_train_batch_size, train_batch_size, train_micro_batch_size_per_gpu, micro_batch_size
    # also: local_batch_size, global_batch_size
    shuffle: bool | None = None  # a new seeded order per epoch; null = true, or false for an iterable dataset
    collate: str | None = None  # package.module:function from a list of samples to a batch (input, target)
    # also: collate_fn, data_collator
    drop_last: bool = False  # leave the last step of an epoch out if it has fewer samples than batch_size
    # also: dataloader_drop_last
    workers: int = 0  # loader processes per rank that loads data
    # also: num_workers, dataloader_num_workers
    check_every: int = 100  # steps between two comparisons of all samples of a step over the ranks that load them
    needs: dict[str, str] = field(default_factory=dict)  # packages that its code imports, and what gets them from pip
    # Options of other groups, used when the user names this data but not those groups.
    goes_with: dict[str, str] = field(default_factory=dict)


@dataclass
class LossConfig:
    """``target(output, target)`` returns a mean over its samples, or ``(sum, weight)``."""

    name: str = "custom"
    target: str = "???"  # package.module:function of output and target
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of target


@dataclass
class ParallelismConfig:
    """Degrees; the world size is their product."""

    name: str = "single"
    pipeline: int = 1  # number of stages, each with a part of the layers
    # also: pipeline_parallel_degree, pipeline_model_parallel_size, pipeline_parallel_size, num_stages
    data: int = 1  # number of replicas, each with a part of the batch
    # also: devices, num_devices, num_processes, nproc_per_node, world_size, num_gpus, gpus
    # also: data_parallel_size, data_parallel_replicate_degree, data_parallel_shard_degree
    # also: dp_replicate_size, dp_shard_size
    tensor: int = 1  # number of parts of every layer
    # also: tensor_parallel_degree, tensor_model_parallel_size, tensor_parallel_size, tp_size, autotp_size
    sharding: dict[str, str] | None = None  # pattern of module names: how such modules are divided
    # also: tp_plan, tensor_plan
    sequence: bool = False  # whether values between divided layers are divided by tokens, too
    # also: sequence_parallel, sp
    scatter_boundaries: bool | None = None  # whether stages exchange one part per rank that divides layers; null = if
    # those are on one node, and there are several nodes
    # also: scatter_gather_tensors_in_pipeline
    loss: str = "auto"  # divided logits: vocabulary: the loss takes parts; gathered: whole ones; auto: parts if it can
    # also: loss_parallel, disable_loss_parallel=true -> gathered
    tensor_sums: str = "auto"  # order of sums over parts: ordered: by rank; native: the library's; auto: by rank on CPU
    batch_sliced: list[str] | None = None  # modules of which each rank that divides layers computes a part of the batch
    order: str | None = None  # pipeline_inside: stages of a replica are neighbours; null = replicas of a stage are
    devices: list[str] | None = None  # class of hardware.devices of each rank of the pipeline; null = in the best order
    ranks: int | None = None  # parallelism=auto: ranks to share out; null = the devices of this machine or batch job
    free: list[str] | None = None  # parallelism=auto: what it may change, as [pipeline,schedule]; null = everything
    search: str = "normal"  # parallelism=auto: how long to look: quick, normal, thorough
    goes_with: dict[str, str] = field(default_factory=dict)


@dataclass
class PlannerConfig:
    """The planner that chooses the layout of ``parallelism=auto``."""

    name: str = "joint"
    target: str | None = None  # your own: package.module:name of a PlannerKind, or a function of a PlanningProblem
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of target
    form: str = "paper"  # of the planner's model: paper; repository, of pipedream; uniform, of alpa: stages that run

    def __post_init__(self) -> None:
        """A target is a planner of one's own, whose option file needs no name."""
        if self.target is not None and self.name == "joint":
            self.name = "custom"


@dataclass
@_with_options(schedules.OPTIONS)
class ScheduleConfig:
    """The order of the pipeline's work. It also has the keys of the schedules in runner/schedule/generators."""

    name: str = "1f1b"
    microbatches: int = 1  # per optimizer step and data replica
    # also: gradient_accumulation_steps, accumulate_grad_batches, num_microbatches, n_microbatches
    chunks: int | None = None  # model chunks per rank; null = the schedule's own
    twin_check_every: int = 100  # steps between two comparisons of a stage's copies on several ranks
    post_validation: bool = False  # update before the global norm and overflow check are known, and undo it if needed
    steps: int | None = None  # windows drawn by `runner schedule`
    target: str | None = None  # your own: package.module:SPEC, or a function of ranks, microbatches and kwargs
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of target

    def option(self, key: str) -> Any:
        """The value of a key that a schedule declares; None where it is not given."""
        return getattr(self, key)

    @property
    def given(self) -> dict[str, Any]:
        """The keys that schedules declare, as far as they are given; false is as good as not given."""
        values = {key: self.option(key) for key in schedules.OPTIONS}
        return {key: value for key, value in values.items() if value is not None and value is not False}

    @property
    def parts(self) -> int | list[float]:
        """How a replica's samples are divided among its micro-batches: so many alike, or by their shares."""
        shares: list[float] | None = self.option("shares")
        return self.computed_microbatches if shares is None else shares

    @property
    def computed_microbatches(self) -> int:
        """Number of micro-batches that are computed: backward halving computes the two halves of each."""
        return self.microbatches * (2 if self.option("variant") == "halving" else 1)


@dataclass
class PartitionConfig:
    """How layers are cut into stages."""

    name: str = "auto"
    boundaries: list[int] | None = None  # manual: first layer of each stage after the first
    migrate: dict[int, list[int]] | None = None  # {steps: boundaries}: layers move to these stages after so many steps


@dataclass
class ZeroConfig:
    """How the replicas of a stage shard weights, gradients and states. Rules: runner/config/rules/zero_table.py."""

    name: str = "none"  # of the preset
    stage: int | None = None  # DeepSpeed shards 0 nothing, 1 states, 2 also gradients, 3 also weights; null = no ZeRO
    # also: zero_optimization.stage, zero_stage
    bucket_elements: int = 5_000_000  # gradient elements reduced at once; each bucket takes memory
    config: str | None = None  # your own DeepSpeed configuration (JSON): checked key by key, then used
    # also: deepspeed, deepspeed_config, deepspeed_config_file


@dataclass
class OffloadConfig:
    """What is moved off the device; ``name`` is a preset of the four."""

    name: str = "none"
    optimizer: str = "none"  # cpu, nvme: optimizer states and their update; needs zero.stage
    # also: offload_optimizer_device, offload_optimizer.device, zero_optimization.offload_optimizer.device
    parameters: str = "none"  # cpu, nvme: weights between their uses; needs zero.stage=3
    # also: offload_param_device, offload_param.device, zero_optimization.offload_param.device
    weights: str = "none"  # a strategy: which weights are in host memory, and on the device while they are used
    blocks: int | None = None  # weights=blockswap: how many of each stage's blocks are in host memory
    fraction: float | None = None  # weights=granular: this share of each stage's layers; null = what memory_limit asks
    frozen_only: bool = False  # with weights: only frozen ones, which nobody writes back
    drive: str | None = None  # folder on a drive: moved activations, or weights, are in files there, not in host memory
    scope: str = "activations"  # what a strategy named by activations chooses among: activations, weights, all
    activations: str = "none"  # save_on_cpu, or a strategy: which saved tensors are in host memory until their backward
    ratio: float = 1.0  # share of the optimizer states that is offloaded
    nvme_path: str | None = None  # folder on the NVMe drive
    # also: offload_optimizer_nvme_path, zero_optimization.offload_optimizer.nvme_path
    delay_from: int | None = None  # from this step on, the host updates during the next step: one step late
    delay_seconds: float = 0.0  # for experiments: added to every move of a layer's activations to the host or back
    bytes_per_second: float | None = None  # for experiments: speed of these moves in one direction; null = not limited
    target: str | None = None  # your own: package.module:name; activations or weights says which of them it moves
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of target

    def __post_init__(self) -> None:
        """A strategy of activations that chooses among weights is a strategy of weights, or of both."""
        if self.scope in ("weights", "all") and self.activations in WEIGHT_STRATEGIES and self.weights == "none":
            self.weights = self.activations
            if self.scope == "weights":
                self.activations = "none"


@dataclass
@_with_options(OPTIONS)
class ActivationCheckpointConfig:
    """Which saved tensors are dropped after the forward and recomputed in the backward.

    It also has the keys of the strategies in runner/memory/solve/strategies.
    """

    name: str = "none"
    target: str | None = None  # your own: package.module:name of a Strategy, or of a function that makes a program
    kwargs: dict[str, Any] = field(default_factory=dict)  # its options

    def __post_init__(self) -> None:
        """A target is a strategy of one's own, whose option file needs no name."""
        if self.target is not None and self.name == "none":
            self.name = "custom"

    @property
    def given(self) -> dict[str, Any]:
        """The strategy's options by key, as far as they are given."""
        if self.target is not None:
            return dict(self.kwargs)
        return {key: getattr(self, key) for key in OPTIONS if getattr(self, key) is not None}


@dataclass
class CompressionConfig:
    """How the gradients of a stage are summed over its replicas."""

    name: str = "none"
    target: str | None = None  # your own: package.module:KIND, or a function of a stage's gradients and kwargs
    kwargs: dict[str, Any] = field(default_factory=dict)  # keys of a compressor of your own
    density: float | None = None  # topk, randomk: the share of each tensor's elements that is sent
    levels: int | None = None  # qsgd: levels of an element's magnitude
    rank: int | None = None  # powersgd, gradzip: columns of a matrix's factors
    error_feedback: bool | None = None  # add what was not sent to the next gradients; null = usual for the compressor
    start_step: int = 0  # steps before this one are summed without compression


@dataclass
class ApproximateBackwardConfig:
    """What layers keep less of for their backward, at the price of approximate gradients."""

    name: str = "none"
    bits: int | None = None  # fewbit: bits of each element that activation functions keep
    ratio: float | None = None  # randomized_linear: share of the rows of their input that linear maps keep


@dataclass
class KernelsConfig:
    """By what means of torch the operators that a model calls are computed."""

    name: str = "none"
    attention: str | None = None  # eager: operator by operator; fused: one; null = as torch chooses
    # also: attn_implementation, use_flash_attn, flash_attention
    norm: str | None = None  # for norms: fused: an RMS norm as one operator; liger: Liger's; null = as the code does
    elementwise: str | None = None  # activations: fused: a chain as one operator, compiled; liger: Liger's, of products
    loss: str | None = None  # fused: the last linear map with its cross-entropy, logits in chunks; liger: Liger's
    substitutions: list[str] = _some_of(SUBSTITUTIONS)  # names of what is replaced in layers; empty = nothing


@dataclass
class OptimizerConfig:
    name: str = "adamw"
    lr: float = 1e-3  # learning rate; the peak if lr_scheduler changes it
    # also: learning_rate
    momentum: float = 0.0  # only for sgd, lars and kfac
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # Adam and its kin only
    eps: float = 1e-8  # Adam and its kin only
    # also: adam_epsilon
    weight_decay: float = 0.0  # share of a weight that decays per step, times the learning rate
    decoupled_weight_decay: bool | None = None  # decay does not enter the moments; null = usual for the optimizer
    target: str | None = None  # your own: package.module:KIND, or a function of parameters, lr and kwargs
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of target
    freeze_step: int | None = None  # 1-bit optimizers: from this step on, variance is constant, momentum sent in bits
    variance_refreshes: int | None = None  # uncompressed steps before the interval between them doubles
    damping: float | None = None  # kfac: its square root is added to the diagonal of each factor
    refresh_every: int | None = None  # kfac: number of steps that use the same inverses; null = 10


@dataclass
class WeightPredictionConfig:
    """Weights at which gradients are computed, predicted from the optimizer's states."""

    name: str | None = None  # null = the schedule's own
    preset: str | None = None  # published gaps: spectrain, pipeoptim, xpipe; null = the schedule's own
    gap: float | None = None  # optimizer steps to look ahead, on every stage; null = as many as a stage is late
    target: str | None = None  # your own: package.module:KIND, or a function of a weight's Moment and kwargs
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of target

    def __post_init__(self) -> None:
        """A target is a prediction of one's own, whose option file needs no name."""
        if self.target is not None and self.name is None:
            self.name = "custom"


@dataclass
class LrSchedulerConfig:
    """The learning rate as a function of the step index."""

    name: str = "constant"
    warmup_steps: int = 0  # steps until the peak
    # also: warmup_steps, num_warmup_steps, warmup_num_steps, lr_warmup_iters, lr_warmup_steps, warmup_iters
    min_lr: float = 0.0  # learning rate at the end of the decay
    total_steps: int | None = None  # null = the run's last step
    # also: lr_decay_iters, total_num_steps
    base_batch: int | None = None  # batch size of optimizer.lr, which scales with data.batch_size; null = no scaling
    target: str | None = None  # your own: package.module:function of step, total_steps, peak and kwargs
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of target

    def __post_init__(self) -> None:
        """A target is a learning rate of one's own, whose option file needs no name."""
        if self.target is not None and self.name == "constant":
            self.name = "custom"


@dataclass
class PrecisionConfig:
    """Number formats by name; the other keys control dynamic loss scaling, for fp16 and fp16_mixed."""

    name: str = "fp32"
    initial_scale: float = 65536.0  # scale of the loss per sample; powers of two scale without rounding
    growth_interval: int = 2000  # steps without overflow before the scale grows
    growth_factor: float = 2.0  # factor on the scale when it grows
    backoff_factor: float = 0.5  # factor on the scale after an overflow
    minimum_scale: float = 2.0**-24  # an overflow at this scale is handled by trainer.on_nonfinite


@dataclass
class TrainerConfig:
    max_steps: int = 100  # total number of optimizer steps, also after a resume
    # also: training.steps, train_steps, num_training_steps, train_iters, max_iters
    max_epochs: int | None = None  # passes over the training data, instead of max_steps; null = max_steps
    # also: num_train_epochs, num_epochs, epochs
    val_every: int | None = None  # steps between validations; null = only at the end
    # also: eval_steps, eval_interval, val_check_interval
    grad_clip_norm: float | None = None  # largest norm over all gradients; null = no clipping
    # also: max_grad_norm, gradient_clip_val, gradient_clipping, max_norm, clip_grad
    grad_clip_value: float | None = None  # largest absolute value of a gradient's element; null = no clipping
    on_nonfinite: str = "stop"  # if a loss or gradient is NaN or infinite, or nothing counts: stop, or skip
    freeze: list[str] = field(default_factory=list)  # patterns of weights that are not trained, e.g. 'embed*'
    ema_decay: float | None = None  # average of weights: average = decay x average + (1 - decay) x weights
    log_every: int = 1  # steps between entries of the loggers
    # also: logging_steps, log_every_n_steps, log_freq, log_interval, steps_per_print
    progress: bool = True  # one line that changes, on a terminal, else 20; false = validations and a line a minute
    # also: enable_progress_bar, disable_tqdm=true -> false
    threads: int = 1  # CPU threads per rank


@dataclass
class CallbackConfig:
    """A Lightning callback: each rank makes it by ``target(**kwargs)``."""

    target: str = "???"  # package.module:Class
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class CheckpointConfig:
    name: str = "every"  # of the preset
    every: int | None = None  # steps between checkpoints; null = by time alone, and after the last step
    # also: save_steps, save_interval, every_n_train_steps, checkpoint.interval
    every_seconds: float | None = 900.0  # a step that ends so long after the last save is saved; null = never by time
    keep: int = 1  # number of newest checkpoints that are kept
    # also: save_total_limit, keep_latest_k
    keep_best: int = 0  # further checkpoints that are kept: those with the lowest validation loss
    # also: save_top_k
    timeout_seconds: float = 3600.0  # a save that takes longer ends the run
    asynchronous: bool = False  # every rank writes its own part during training, from a copy in memory
    try_first: bool = True  # a save is made in memory before the first step; false = what cannot be saved is left out
    allow_pickle: list[str] = field(default_factory=list)  # classes that a file may construct, as package.module:name


@dataclass
class LinkClassConfig:
    """One class of ``hardware.links``: what two ranks of a group use that are in no common group of a class before."""

    name: str = ""
    ranks: str = ""  # neighbouring ranks of a group; all = every rank of the run
    latency_seconds: float = 0.0  # of a message
    bytes_per_second: float = 0.0  # of a message; with shared, out of a group of the class before, of all its ranks
    shared: bool = False  # whether the ranks of such a group, a node for a network, share the bytes per second


@dataclass
class DeviceClassConfig:
    """One class of ``hardware.devices``: ranks whose devices are alike."""

    name: str = ""
    count: int = 1  # ranks of the run that have such a device; replicas of a stage have devices of one class
    speed: float = 1.0  # how fast it computes, in parts of the described device's speed: 0.25 takes four times as long
    memory_bytes: float | None = None  # of one such device; null = that of the described device


@dataclass
class HardwareConfig:
    """The machine to plan for; None means that a figure is not known."""

    name: str = "auto"
    flops: dict[str, float] = field(default_factory=dict)  # peak FLOP/s of one device, by precision
    memory_bytes: float | None = None  # memory of one device
    host_memory_bytes: float | None = None  # memory of one host, for what is offloaded
    link_bytes_per_second: float | None = None  # between neighbouring ranks
    link_latency_seconds: float = 0.0  # of a message between neighbouring ranks
    memory_bytes_per_second: float | None = None  # memory bandwidth of one device, which limits an optimizer step
    devices_per_node: int | None = None  # ranks on different nodes exchange over the network
    network_bytes_per_second: float | None = None  # bandwidth out of one node, shared by its ranks that send
    devices: list[DeviceClassConfig] = field(default_factory=list)  # classes of unlike devices; [] = all are alike
    links: list[LinkClassConfig] = field(default_factory=list)  # classes, inner ones first; instead of the short keys
    host_link_bytes_per_second: float | None = None  # between a device and its host, in one direction
    host_memory_bytes_per_second: float | None = None  # memory bandwidth of the host, for updates there
    source: str = ""  # where the figures are from


@dataclass
class CostConfig:
    """Costs in one unit for a rank's whole share of a micro-batch: for `runner schedule` and cost-based schedules."""

    F: float = 1.0  # forward
    B: float = 2.0  # backward, both of its parts
    I: float | None = None  # noqa: E741 - gradient of the input; null = half of cost.B
    W: float | None = None  # gradient of the weights; null = half of cost.B
    comm: float = 0.0  # a message
    curvature: float = 0.5  # K-FAC: one of the two curvature sums of a micro-batch
    inversion: float = 1.5  # K-FAC: one of the two inversions of a step


@dataclass
class TransportConfig:
    """A slower link for experiments: messages between ranks are delayed."""

    delay_seconds: float = 0.0  # added to every message
    bytes_per_second: float | None = None  # bandwidth of a link in one direction; null = not limited
    emulate_links: bool = False  # a message also takes what its class of hardware.links does, if all its ranks send


@dataclass
class LauncherConfig:
    """Chooses where the ranks run. Rules: runner/config/rules/launcher.py."""

    name: str = "local"
    rendezvous_timeout_seconds: float = 60.0  # longest wait until all ranks have met
    start_timeout_seconds: float | None = 3600.0  # local: a rank that needs longer to its first step is ended
    step_timeout_seconds: float = 600.0  # a message that takes longer ends the run
    watchdog_seconds: float | None = 300.0  # a rank without progress for this long reports where it is; null = never
    exit_timeout_seconds: float | None = 600.0  # local: a rank that needs longer to its end after its work is ended
    grace_seconds: float | None = None  # local: time to end a step and save when told to stop; null = until a job's end
    max_restarts: int = 0  # how often a failed run is restarted from its newest checkpoint
    nodes: int | None = None  # slurm: machines that share the ranks evenly; null = 1
    # also: num_nodes, nnodes, num_machines
    gpus_per_node: int | None = None  # slurm; null = one for each rank with device=cuda, else none
    cpus_per_task: int | None = None  # slurm: cores per rank; null = trainer.threads + data.workers
    time_limit: str | None = None  # slurm: time limit of the job, [days-]hours:minutes:seconds; null = the partition's
    # also: max_time
    signal_seconds: int = 120  # slurm: seconds before the time limit at which a job saves and is queued again
    requeue: bool = True  # slurm: queue a job again if it was stopped or its node failed; it then resumes
    partition: str | None = None  # slurm; null = the cluster's default
    account: str | None = None  # slurm; null = the user's default
    sbatch: list[str] = field(default_factory=list)  # slurm: further options of the batch script, e.g. --mem=0
    setup: list[str] = field(default_factory=list)  # slurm: shell lines before the ranks start, e.g. module load cuda
    prefix: str | None = None  # slurm: words before each rank's command, e.g. apptainer exec --nv torch.sif
    wait: bool = False  # slurm: follow the job to its end
    dry_run: bool = False  # slurm: print the batch script and submit nothing

    @property
    def message_timeout_seconds(self) -> float:
        """The longest wait for a message of another rank.

        Where a watchdog ends a rank that is stuck, the others wait longer than it does: otherwise they would be
        reported as the cause.
        """
        return self.step_timeout_seconds + (WATCHDOG_MARGIN_SECONDS if self.watchdog_seconds is not None else 0.0)


@dataclass
class LoggerConfig:
    name: str = "tensorboard"
    target: str | None = None  # class of a Lightning logger, package.module:Class
    kwargs: dict[str, Any] = field(default_factory=dict)  # its arguments
    others: list[str] = field(default_factory=list)  # loggers beside it: logger=[tensorboard,csv]


@dataclass
class ProfilerConfig:
    name: str = "none"


@dataclass
class ProfileConfig:
    refresh: bool = False  # measure the model again, whatever is known of it


@dataclass
class RunConfig:
    """A whole request."""

    name: str = "run"  # name of the directory under outputs/
    # also: run_name, experiment_name
    seed: int = 0  # seed of the weights, the order of samples and dropout
    # also: seed_everything, data_seed, random_seed
    run_dir: str | None = None  # null = outputs/<name>/<timestamp>
    # also: sweep_dir, output_dir, out_dir, log_dir, default_root_dir, project_dir, dump_folder
    resume: str | None = None  # path of a checkpoint; auto = newest valid one in run_dir, else from the start
    # also: resume_from_checkpoint, ckpt_path, resume_from_checkpoint=true -> auto
    memory_limit: str | None = None  # memory that a rank may use: 80GB, 8GiB, or a number of bytes
    device: str = "auto"  # auto, cpu, cuda
    # also: accelerator=gpu -> cuda, accelerator=cuda -> cuda, accelerator=cpu -> cpu, use_cpu=true -> cpu
    # also: accelerator=auto -> auto, cpu=true -> cpu, no_cuda=true -> cpu
    compile: bool = False  # compile every layer with torch.compile
    # also: torch_compile
    report: str | None = None  # package.module:function that is called with the finished run's directory
    sweep: dict[str, list[Any]] = field(default_factory=dict)  # keys that -m varies unless the command names them
    sweep_most: int = 1000  # a sweep of more jobs is refused before any of them is listed
    sweep_without: list[str] = field(default_factory=list)  # jobs that are left out: "key=value key=value: reason"
    sweep_report: str | None = None  # package.module:function that makes tables from a sweep's records
    sweep_retry: str | None = None  # failed: a sweep that is started again repeats its jobs that did not end ok
    sweep_on_failure: str = "continue"  # after a failed job: continue, stop the sweep, or ignore it in the exit status
    plan_report: str | None = None  # package.module:function that makes a table from the plans of a sweep
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    metrics: dict[str, str] = field(default_factory=dict)  # metrics.NAME=mine:function of output and target: val_NAME
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    # also: pipeline_parallel_schedule
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    # also: activation_checkpoint.mode, recompute_granularity
    approximate_backward: ApproximateBackwardConfig = field(default_factory=ApproximateBackwardConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    # also: optim, optimizer_type, optimizer.type
    weight_prediction: WeightPredictionConfig = field(default_factory=WeightPredictionConfig)
    lr_scheduler: LrSchedulerConfig = field(default_factory=LrSchedulerConfig)
    # also: lr_scheduler_type, scheduler.type
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    # also: mixed_precision_param, dtype, torch_dtype
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: dict[str, CallbackConfig] = field(default_factory=dict)  # callbacks.NAME.target=package.module:Class
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    # also: report_to, log_with
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
