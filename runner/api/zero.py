"""DeepSpeed's ZeRO and offload, alone or under a pipeline, as a strategy for a user's own Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import optim
from typing_extensions import override

from runner.api.pipeline import PRECISIONS, PipelineStrategy, trainer_options
from runner.config.deepspeed import deepspeed_settings
from runner.config.deepspeed_file import file_problems
from runner.config.rules.zero_table import ZERO
from runner.config.schema import (
    DataConfig,
    OffloadConfig,
    OptimizerConfig,
    ParallelismConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
    ZeroConfig,
)
from runner.errors import Problem, raise_problems
from runner.launch.needs.packages import missing_packages
from runner.launch.needs.zero import zero_needs
from runner.plan.rules.zero import shares_by_itself
from runner.strategy.zero import strategy
from runner.training.averaging import WeightAveraging

__all__ = ["ZeroStrategy"]

_ELEMENTWISE = (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD)


class ZeroStrategy(PipelineStrategy, strategy.ZeroEngineStrategy):
    """``Trainer(strategy=ZeroStrategy(ZeroConfig(stage=2), OffloadConfig(optimizer="cpu"), data=2), devices=2)``.

    Gradients, optimizer states and weights are sharded over the replicas, with or without a pipeline. The keys and
    their rules are those of ``runner train``: see docs/zero.md.

    Args:
        zero: its ``stage``, buckets, and optionally your own DeepSpeed configuration.
        offload: what is moved off the device.
        stages, **layout: as for :class:`PipelineStrategy`.

    Raises:
        RequestError: when fitting begins: a rule is broken, or this machine does not meet a requirement.
    """

    def __init__(
        self, zero: ZeroConfig, offload: OffloadConfig | None = None, *, stages: int = 1, **layout: Any
    ) -> None:
        super().__init__(stages=stages, **layout)
        self._zero, self._offload = zero, offload or OffloadConfig()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.engine is None:
            request = self.require_possible(trainer)
            self.settings = deepspeed_settings(request, accelerated=self.root_device.type == "cuda")
        elif trainer.state.fn == TrainerFn.FITTING:
            why = "DeepSpeed has taken over the first one's optimizer, and Lightning makes another"
            raise_problems([Problem("Trainer.fit", "again", "must be the only one", why, "ckpt_path in a new Trainer")])
        super().setup(trainer)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        kinds = [type(optimizer) for optimizer in self.optimizers]
        if self._zero.stage and any(kind not in _ELEMENTWISE for kind in kinds):
            rule = f"must be one of torch.optim's {', '.join(kind.__name__ for kind in _ELEMENTWISE)}"
            why = "ZeRO updates flat partitions of the weights, where a non-elementwise optimizer gives other results"
            name = ", ".join(kind.__name__ for kind in kinds)
            raise_problems([Problem("configure_optimizers", name, rule, why, "PipelineStrategy, for any optimizer")])

    def require_possible(self, trainer: pl.Trainer) -> RunConfig:
        """The request of ``runner train`` that corresponds to this strategy and Trainer.

        Raises:
            RequestError: ``runner train`` would refuse it.
        """
        request = self._request(trainer)
        problems = [*_own_problems(request), *ZERO.problems(request), *file_problems(request)]
        if shares_by_itself(request, self.plan.schedule):
            why = "DeepSpeed's engine cannot stand in for it, and the runner's own sharing is runner train's"
            problems.append(
                Problem("schedule.name", self.plan.schedule.name, "must be another", why, "schedule='1f1b'")
            )
        missing = missing_packages(request).values()
        raise_problems([*problems, *zero_needs(request, cuda=self.root_device.type == "cuda"), *missing])
        return request

    def _request(self, trainer: pl.Trainer) -> RunConfig:
        options = trainer_options(trainer, self._scaling)
        microbatches = self.options.microbatches
        averages = any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        return RunConfig(
            zero=self._zero,
            offload=self._offload,
            parallelism=ParallelismConfig(pipeline=len(self.plan.schedule.placement[0]), data=self._data),
            schedule=ScheduleConfig(name=self.plan.schedule.name, microbatches=microbatches),
            data=DataConfig(batch_size=microbatches * self._data),
            optimizer=OptimizerConfig(name="auto"),
            precision=PrecisionConfig(PRECISIONS[str(trainer.precision)]),
            trainer=TrainerConfig(
                grad_clip_norm=options["clip_norm"],
                grad_clip_value=options["clip_value"],
                ema_decay=0.0 if averages else None,
            ),
        )


def _own_problems(request: RunConfig) -> list[Problem]:
    """Problems with settings that a user's own script cannot have."""
    problems = []
    if request.zero.stage is None:
        problems.append(Problem("zero.stage", None, "must be 0, 1, 2 or 3", fix="PipelineStrategy, for none"))
    if request.offload.activations != "none":
        why = "A plan decides which activations are kept and where, and a script has no plan"
        problems.append(Problem("offload.activations", request.offload.activations, "must be none", why, "none"))
    if request.offload.delay_from is not None:
        why = "A delayed update needs an optimizer over copies of the weights, but your module makes the optimizer"
        problems.append(Problem("offload.delay_from", request.offload.delay_from, "must be null", why, "None"))
    return problems
