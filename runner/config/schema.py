"""The typed shape of a request: one dataclass per section, units in the names or the comments.

OmegaConf needs these mutable; the resolved tree is treated as a value all the same: nothing changes
it after :func:`runner.config.compose.resolve.resolve`, and what a run stands on is the frozen plan.

The defaults here are the contract's for a run that names its own model or data. Options of a group
(``conf/<group>/<option>.yaml``) fill a section; ``name`` is the option's name where one is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from runner.memory.solve.strategies import options_by_key, owners_of

__all__ = [
    "ActivationCheckpointConfig",
    "CheckpointConfig",
    "CostConfig",
    "DataConfig",
    "HardwareConfig",
    "LauncherConfig",
    "LoggerConfig",
    "LossConfig",
    "LrSchedulerConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "PartitionConfig",
    "PrecisionConfig",
    "PolicyConfig",
    "ProfilerConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainerConfig",
    "TransportConfig",
    "ZeroConfig",
]


Section = TypeVar("Section")


@dataclass
class ModelConfig:
    """``target`` is ``package.module:function``; it is called with ``kwargs`` and returns the model."""

    name: str = "custom"
    target: str = "???"
    kwargs: dict[str, Any] = field(default_factory=dict)
    split_points: list[str] | None = None  # traced models: modules before which to cut; null = where little crosses
    # Group options used when the user names this model but not its data or loss.
    goes_with: dict[str, str] = field(default_factory=dict)


@dataclass
class DataConfig:
    """``target`` returns a dataset of ``(input, target)``, or ``(train, val)`` of them."""

    name: str = "custom"
    target: str = "???"
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32  # samples per optimizer step, over all ranks
    shuffle: bool | None = None  # a new seeded order per epoch; null = true, or an iterable dataset's own order
    collate: str | None = None  # package.module:function that makes a batch (input, target) of a list of samples
    workers: int = 0  # loader processes per rank that loads data


@dataclass
class LossConfig:
    """``target(output, target)`` returns a mean over its samples, or ``(sum, weight)``."""

    name: str = "custom"
    target: str = "???"
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ParallelismConfig:
    """Degrees; the world size is their product."""

    name: str = "single"
    pipeline: int = 1  # stages in a row, each with a part of the layers
    data: int = 1  # replicas, each with a part of the batch
    tensor: int = 1  # parts of every layer


@dataclass
class ScheduleConfig:
    """Order of the pipeline's work. Keys other than ``microbatches`` apply where the schedule says so."""

    name: str = "1f1b"
    microbatches: int = 1  # per optimizer step and data replica
    chunks: int | None = None  # model chunks per rank; null = the schedule's own
    variant: str | None = None  # chimera: concatenation, doubling, halving; null = concatenation
    pipes: int | None = None  # chimera: pipelines, half of them down and half up; null = 2
    twin_check_every: int = 100  # several pipelines: steps between two comparisons of the copies of a stage
    file: str | None = None  # from_file: a schedule in torch's CSV form
    post_validation: bool = False  # ranks update before all have agreed to it, and take it back where one objects
    memory_limit: int | None = None  # zb_auto: micro-batches a rank may keep between F and W; null = its ranks
    base: str | None = None  # pipefisher: the schedule whose bubbles are filled: 1f1b, gpipe; null = 1f1b
    opportunistic: bool | None = None  # varuna: a forward in place of a backward whose gradient is late; null = false
    steps: int | None = None  # windows drawn by `runner schedule`

    @property
    def computed_microbatches(self) -> int:
        """What ``microbatches`` are computed as: backward halving computes the halves of each."""
        return self.microbatches * (2 if self.variant == "halving" else 1)


@dataclass
class PartitionConfig:
    """How layers are cut into stages."""

    name: str = "uniform"
    boundaries: list[int] | None = None  # manual: first layer of each stage after the first


@dataclass
class ZeroConfig:
    """How the replicas of a stage share out what they would each hold. Rules: runner/config/rules/zero_table.py."""

    stage: int | None = None  # null = each holds all; DeepSpeed: 0 nothing, 1 states, 2 gradients, 3 weights shared out
    bucket_elements: int = 5_000_000  # gradients reduced at once; each bucket takes memory
    config: str | None = None  # a DeepSpeed configuration of your own (JSON): checked key by key, then used


@dataclass
class OffloadConfig:
    """What leaves the device; ``name`` is a preset of the three."""

    name: str = "none"
    optimizer: str = "none"  # cpu, nvme: states, and their update, with zero.stage
    parameters: str = "none"  # cpu, nvme: weights between their uses, with zero.stage=3
    activations: str = "none"  # save_on_cpu: saved tensors wait for their backward in the host's memory
    ratio: float = 1.0  # of the optimizer states that leave the device
    nvme_path: str | None = None  # folder on the drive for nvme
    delay_from: int | None = None  # from this step on the host updates beside the next step, which takes effect late


def _with_keys_of_strategies(section: type[Section]) -> type[Section]:
    """Give a section the keys that the shipped strategies read, null where they are not given."""
    for key, option in options_by_key().items():
        section.__annotations__[key] = option.kind | None
        told = f"{' or '.join(owners_of(key))}: {option.about}"
        setattr(section, key, field(default=None, metadata={"about": told}))
    return section


@dataclass
@_with_keys_of_strategies
class ActivationCheckpointConfig:
    """Which saved tensors are dropped after the forward and computed again in the backward.

    Besides these keys it has those that the strategies read (runner/memory/solve/strategies).
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
        return {key: getattr(self, key) for key in options_by_key() if getattr(self, key) is not None}


@dataclass
class PolicyConfig:
    """A group whose options differ by name alone."""

    name: str = "none"


@dataclass
class OptimizerConfig:
    name: str = "adamw"
    lr: float = 1e-3  # the peak, where a schedule changes it
    momentum: float = 0.0  # sgd, lars and kfac only
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # Adam and its kin only
    eps: float = 1e-8  # Adam and its kin only
    weight_decay: float = 0.0
    decoupled_weight_decay: bool | None = None  # decay leaves the moments alone; null = the optimizer's own way
    target: str | None = None  # optimizer=custom: package.module:function of the parameters, lr and kwargs
    kwargs: dict[str, Any] = field(default_factory=dict)  # its other arguments
    freeze_step: int | None = None  # 1-bit ones: from this step on the variance stays and momentum travels in bits
    variance_refreshes: int | None = None  # zero_one_adam: full steps before the interval between them doubles
    damping: float | None = None  # kfac: its square root is added to the diagonal of each factor
    refresh_every: int | None = None  # kfac: updates that use the inverses of one step's factors; null = 10


@dataclass
class LrSchedulerConfig:
    """The learning rate as a function of the step index."""

    name: str = "constant"
    warmup_steps: int = 0  # steps until the peak
    min_lr: float = 0.0  # where the decay ends
    total_steps: int | None = None  # null = trainer.max_steps
    base_batch: int | None = None  # data.batch_size that optimizer.lr is for: others get it in proportion; null = any


@dataclass
class PrecisionConfig:
    """Number formats by name; the other keys are of dynamic loss scaling, for fp16 and fp16_mixed."""

    name: str = "fp32"
    initial_scale: float = 65536.0  # of the loss per sample; a power of two scales without rounding
    growth_interval: int = 2000  # steps without overflow before the scale grows
    growth_factor: float = 2.0
    backoff_factor: float = 0.5  # what an overflow multiplies the scale by
    minimum_scale: float = 2.0**-24  # an overflow at this scale is treated as trainer.on_nonfinite says


@dataclass
class TrainerConfig:
    max_steps: int = 100  # optimizer steps in all, also after a resume
    val_every: int | None = None  # steps between validations; null = at the end only
    grad_clip_norm: float | None = None  # most the norm over all gradients may be; null = no clipping
    grad_clip_value: float | None = None  # most an element of a gradient may be; null = no clipping
    on_nonfinite: str = "stop"  # where the loss or a gradient is NaN or infinite: stop, or skip the step
    ema_decay: float | None = None  # average the weights: average = decay x average + (1 - decay) x weights
    log_every: int = 1  # steps between lines of the loggers
    progress: bool = True  # the progress bar
    threads: int = 1  # CPU threads per rank


@dataclass
class CheckpointConfig:
    every: int | None = None  # steps between saves; null = the last step only
    keep: int = 1  # newest ones kept
    keep_best: int = 0  # kept beside them, of those at a validation: the ones with the least loss
    asynchronous: bool = False  # every rank writes its own part while training goes on; it costs a copy in memory
    allow_pickle: list[str] = field(default_factory=list)  # what a file may call: package.module:name of each class


@dataclass
class HardwareConfig:
    """The machine to plan for. A null says that the figure is not known."""

    name: str = "auto"
    flops: dict[str, float] = field(default_factory=dict)  # peak FLOP/s of one device, by precision
    memory_bytes: float | None = None  # of one device
    host_memory_bytes: float | None = None  # of the machine around its devices, for what is offloaded
    link_bytes_per_second: float | None = None  # between neighbouring ranks
    link_latency_seconds: float = 0.0
    memory_bytes_per_second: float | None = None  # of one device: what an optimizer step is bound by
    devices_per_node: int | None = None  # behind whom replicas talk over the network
    network_bytes_per_second: float | None = None  # of a node, out of it: all its adapters together
    host_link_bytes_per_second: float | None = None  # between a device and its host, one direction
    host_memory_bytes_per_second: float | None = None  # of the machine, for updates in the host
    source: str = ""


@dataclass
class CostConfig:
    """Costs in one unit, of a rank's whole share of a micro-batch: for `runner schedule`, and orders made by costs."""

    F: float = 1.0
    B: float = 2.0
    I: float = 1.0  # noqa: E741 - the field's name in the literature
    W: float = 1.0
    comm: float = 0.0
    curvature: float = 0.5  # K-FAC: one of the two sums of a micro-batch
    inversion: float = 1.5  # K-FAC: one of the two inversions, of a step


@dataclass
class TransportConfig:
    """A link slower than the machine's, for experiments: messages between ranks are held back."""

    delay_seconds: float = 0.0  # added to every message
    bytes_per_second: float | None = None  # of a link in one direction; null = its own speed


@dataclass
class LauncherConfig:
    """Where the ranks run. Rules: runner/config/rules/launcher.py."""

    name: str = "local"
    rendezvous_timeout_seconds: float = 60.0  # until all ranks have met
    step_timeout_seconds: float = 600.0  # a message that takes longer ends the run
    watchdog_seconds: float | None = 300.0  # a rank without progress says where it stands; null = never
    max_restarts: int = 0  # times that a run that broke starts again from its newest checkpoint
    nodes: int | None = None  # slurm: machines that share the ranks evenly; null = 1
    gpus_per_node: int | None = None  # slurm; null = one for each rank with device=cuda, else none
    cpus_per_task: int | None = None  # slurm: cores of a rank; null = trainer.threads + data.workers
    time_limit: str | None = None  # slurm: of the job, [days-]hours:minutes:seconds; null = the partition's
    signal_seconds: int = 120  # slurm: so long before its time limit a job saves and is queued again
    requeue: bool = True  # slurm: a job that was stopped, or whose node failed, is queued again and goes on
    partition: str | None = None  # slurm; null = the cluster's default
    account: str | None = None  # slurm; null = the user's default
    sbatch: list[str] = field(default_factory=list)  # slurm: further options of the batch script, as --mem=0
    wait: bool = False  # slurm: follow the job to its end
    dry_run: bool = False  # slurm: print the batch script and submit nothing


@dataclass
class LoggerConfig:
    name: str = "tensorboard"
    target: str | None = None  # a Lightning logger class, package.module:Class
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ProfilerConfig:
    name: str = "none"


@dataclass
class RunConfig:
    """A whole request."""

    name: str = "run"  # names the directory under outputs/
    seed: int = 0  # of the weights, the order of samples and dropout
    run_dir: str | None = None  # null = outputs/<name>/<timestamp>
    resume: str | None = None  # auto = newest good checkpoint in run_dir, else start; a checkpoint
    memory_limit: str | None = None  # bytes a rank may use: 80GB, 8GiB, a number
    device: str = "auto"  # auto, cpu, cuda
    compile: bool = False  # torch.compile every layer
    report: str | None = None  # package.module:function called with the finished run's directory
    sweep: dict[str, list[Any]] = field(default_factory=dict)  # what -m varies where the command does not name it
    sweep_without: list[str] = field(default_factory=list)  # jobs that a sweep leaves out: "key=value key=value: why"
    sweep_report: str | None = None  # package.module:function that makes tables of a sweep's records
    sweep_retry: str | None = None  # failed: a sweep that is started again tries its jobs that did not end ok once more
    sweep_on_failure: str = "continue"  # continue, stop the sweep, or ignore: its status tells of no failure
    plan_report: str | None = None  # package.module:function that makes a table of the plans of a sweep
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compression: PolicyConfig = field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LrSchedulerConfig = field(default_factory=LrSchedulerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
