"""DeepSpeed's Adam in compiled operators: one for the host, and one with few kernels for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.schema import OptimizerConfig
from runner.optim.catalogue.kind import BETAS, OptimizerKind, common_settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["CPU_ADAM", "FUSED_ADAM"]

_MODULE = "runner.optim.kinds.deepspeed"


def _cpu_adam(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.deepspeed import CPUAdam
    from runner.optim.operators import load_operators

    load_operators(["cpu_adam"], accelerator=parameters[0].device.type)
    adamw = section.decoupled_weight_decay is not False
    # As in torch, states have the format of the updated weights: 16 bits without master weights.
    made: Optimizer = CPUAdam(parameters, **common_settings(section), adamw_mode=adamw, fp32_optimizer_states=False)
    return made


def _fused_adam(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.deepspeed import FusedAdam
    from runner.optim.operators import load_operators

    load_operators(["fused_adam"], accelerator=parameters[0].device.type)
    adamw = section.decoupled_weight_decay is not False
    made: Optimizer = FusedAdam(parameters, **common_settings(section), adam_w_mode=adamw)
    return made


CPU_ADAM = OptimizerKind(
    name="cpu_adam",
    description="AdamW updated by the host's cores",
    cost="2, in the host's memory",
    remarks="DeepSpeed; with `zero.stage` 1 to 3",
    make=_cpu_adam,
    lingering=0,
    values=2.0,
    reads=BETAS,
    package="deepspeed",
    operator="cpu_adam",
    imports=(_MODULE,),
    elementwise=True,
    place="host",
    brings={"offload": "optimizer_cpu"},
    classes=("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",),
    counts_steps="number",
)

FUSED_ADAM = OptimizerKind(
    name="fused_adam",
    description="AdamW in few kernels over all weights",
    cost="2",
    remarks="DeepSpeed",
    make=_fused_adam,
    lingering=0,
    values=2.0,
    reads=BETAS,
    package="deepspeed",
    operator="fused_adam",
    imports=(_MODULE,),
    elementwise=True,
    place="device",
    classes=("deepspeed.ops.adam.fused_adam.FusedAdam",),
    counts_steps="number",
)
