"""What ZeRO and offload cannot do is refused before anything starts, with whose rule it is."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.config.compose.resolve import resolve
from runner.config.deepspeed import deepspeed_settings
from runner.config.rules.sections import rules
from runner.config.rules.zero_table import ROWS
from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError
from runner.plan.make import make_plan, plan_problems
from runner.profiling.model import profile_model

BASE = ["model=mlp", "parallelism.data=2"]
TWIN = ["zero.stage=3", "optimizer=cpu_adam", "offload.ratio=0.5"]
HOST_16 = ["optimizer=cpu_adam", "precision=bf16"]
NVME = ["offload.optimizer=nvme", "offload.nvme_path=/tmp"]

REFUSED = [  # overrides, the key that is refused, what its source must name
    (["zero.stage=4"], "zero.stage", "ZeroStageEnum"),
    (["zero.stage=3", "parallelism.pipeline=2", "schedule.microbatches=2"], "zero.stage", "pipe/engine.py"),
    (["zero.stage=1", "zero.bucket_elements=0"], "zero.bucket_elements", "reduce_bucket_size"),
    (["offload.optimizer=cpu"], "offload.optimizer", "valid with stage 1, 2, and 3"),
    (["zero.stage=0", "offload.optimizer=cpu"], "offload.optimizer", "valid with stage 1, 2, and 3"),
    (["zero.stage=1", *NVME], "offload.optimizer", "stage_1_and_2.py"),
    (["zero.stage=2", *NVME], "offload.optimizer", "stage_1_and_2.py"),
    (["zero.stage=2", "offload.optimizer=disk"], "offload.optimizer", "OffloadDeviceEnum"),
    (["zero.stage=2", "offload.optimizer=cpu", "precision=bf16"], "offload.optimizer", "_configure_master_weights"),
    (["offload.parameters=cpu"], "offload.parameters", "valid only with stage 3"),
    (["zero.stage=1", "offload.parameters=cpu"], "offload.parameters", "valid only with stage 3"),
    (["zero.stage=2", "offload.parameters=nvme", NVME[1]], "offload.parameters", "valid only with stage 3"),
    (["zero.stage=3", "offload.parameters=disk"], "offload.parameters", "OffloadDeviceEnum"),
    (["zero.stage=3", "offload.ratio=0.5"], "offload.ratio", "ratio"),
    (["zero.stage=3", "offload.optimizer=cpu", "offload.ratio=0"], "offload.ratio", "ratio"),
    (["zero.stage=2", "offload.optimizer=cpu", "offload.ratio=0.5"], "offload.ratio", "offload_ratio_check"),
    (["zero.stage=3", *NVME, "offload.ratio=0.5"], "offload.ratio", "CPU Adam"),
    (["zero.stage=3", "offload.optimizer=cpu", "offload.ratio=0.5"], "offload.ratio", "DeepSpeedCPUAdam"),
    ([*TWIN, "optimizer.decoupled_weight_decay=false"], "offload.ratio", "backup_optimizer"),
    ([*TWIN, "offload.delay_from=1"], "offload.ratio", "DeepSpeedCPUAdam"),
    ([*TWIN, "offload.parameters=nvme", NVME[1]], "offload.ratio", "params_in_nvme_and_cpu"),
    (["zero.stage=3", "offload.optimizer=nvme"], "offload.nvme_path", "_configure_tensor_swapping"),
    (["zero.stage=3", "offload.optimizer=cpu", "offload.nvme_path=/tmp"], "offload.nvme_path", "the runner"),
    (["zero.stage=1", "offload.delay_from=1"], "offload.delay_from", "ZeRO-Offload"),
    (["zero.stage=1", "offload.optimizer=cpu", "offload.delay_from=0"], "offload.delay_from", "_lazy_init"),
    (["zero.stage=2", *HOST_16, "offload.delay_from=1"], "offload.delay_from", "_configure_master_weights"),
    (["zero.stage=2", "trainer.grad_clip_value=1"], "trainer.grad_clip_value", "unscale_and_clip_grads"),
    (["zero.stage=3", "trainer.ema_decay=0.9"], "trainer.ema_decay", "_partition_all_parameters"),
    (["zero.stage=3", "activation_checkpoint=full"], "activation_checkpoint.name", "torch.utils.checkpoint"),
    (["zero.stage=3", "offload=activations_save_on_cpu"], "offload.activations", "the runner"),
    (["zero.stage=1", "compile=true"], "compile", "#8061"),
    (["zero.stage=1", "schedule.post_validation=true"], "schedule.post_validation", "stage_1_and_2.py: step"),
    (["zero.stage=1", "data.batch_size=1"], "data.batch_size", "the runner"),
    (["zero.config=a.json"], "zero.config", "the runner"),
    (["zero.stage=2", "optimizer=onebit_adam"], "optimizer.name", "0.19.7"),
    (["zero.stage=2", "optimizer=cpu_adam", "offload=none"], "optimizer.name", "cpu_adam.py"),
    (["zero.stage=2", "optimizer=adam8bit", "offload.optimizer=cpu"], "optimizer.name", "bitsandbytes"),
]  # fmt: skip


def problems(overrides: list[str] | tuple[str, ...]) -> list[Problem]:
    return rules(resolve([*BASE, *overrides]))


@pytest.mark.costly
@pytest.mark.parametrize(("overrides", "path", "source"), REFUSED)
def test_refused_with_its_source(overrides: list[str], path: str, source: str) -> None:
    found = [problem for problem in problems(overrides) if problem.path == path]
    assert len(found) == 1
    assert source in found[0].why
    assert found[0].fix


def test_all_that_is_refused_breaks_a_row_of_the_table() -> None:
    """No request is composed here, which takes longer than all of these rules."""
    for overrides, path, _ in REFUSED:
        config = RunConfig()
        for key, value in (_key_and_value(each) for each in ["parallelism.data=2", *overrides]):
            *sections, last = key.split(".")
            place = attrgetter(".".join(sections))(config) if sections else config
            setattr(place, last, value)
        assert path in {row.path for row in ROWS if row.breaks(config)}, overrides


def _key_and_value(override: str) -> tuple[str, Any]:
    """The key that an override sets; of the option of a group, the one that names it."""
    key, _, text = override.partition("=")
    if key == "offload":
        return "offload.activations", text.removeprefix("activations_")
    return key if "." in key or key == "compile" else f"{key}.name", yaml.safe_load(text)


@pytest.mark.costly
def test_every_row_has_a_request_that_breaks_it() -> None:
    """A row that nothing breaks would be a rule about nothing."""
    broken = set()
    for overrides, *_ in REFUSED:
        config = resolve([*BASE, *overrides])
        broken |= {ROWS.index(row) for row in ROWS if row.breaks(config)}
    never = [ROWS[number].path for number in range(len(ROWS)) if number not in broken]
    assert never == [], "add a request that breaks it to REFUSED above"


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"zero.stage={stage}"] for stage in (0, 1, 2, 3)),
        *([f"zero.stage={stage}", "offload.optimizer=cpu", "precision=bf16_master"] for stage in (1, 2, 3)),
        *([f"zero.stage={stage}", *HOST_16] for stage in (1, 2, 3)),
        TWIN,
        [*TWIN, "offload.parameters=cpu", "precision=bf16"],
        ["zero.stage=3", "offload.parameters=cpu"],
        ["zero.stage=3", *NVME, "offload.parameters=nvme"],
        ["zero.stage=2", "parallelism.pipeline=2", "schedule.microbatches=4", "activation_checkpoint=full"],
    ],
)
def test_what_works_is_not_refused(overrides: list[str]) -> None:
    assert problems(overrides) == []


def test_schedules_that_split_the_backward_share_out_states_alone(tmp_path: Path) -> None:
    """DeepSpeed's hooks count those of whole backwards: the runner does it, and what it cannot is refused."""
    rows = ["0F0,0F1,0I0,0W0,0I1,0W1", "1F0,1I0,1W0,1F1,1I1,1W1"]
    (tmp_path / "split.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    asked = ["schedule=from_file", f"schedule.file={tmp_path / 'split.csv'}", "schedule.microbatches=2"]
    asked += [*BASE, "parallelism.pipeline=2"]
    assert plan_problems(resolve([*asked, "zero.stage=1"]), 4) == []
    (tmp_path / "empty.json").write_text("{}", encoding="utf-8")
    for more, path in (
        (["zero.stage=2"], "zero.stage"),
        (["zero.stage=1", "offload.optimizer=cpu"], "offload.optimizer"),
        (["zero.stage=1", "optimizer=fused_adam"], "optimizer.name"),
        (["zero.stage=1", "precision=bf16_master"], "precision.name"),
        (["zero.stage=1", f"zero.config={tmp_path / 'empty.json'}"], "zero.config"),
    ):
        (problem,) = plan_problems(resolve([*asked, *more]), 4)
        assert problem.path == path
        assert "create_gradient_handling_hooks" in problem.why


@pytest.mark.costly
def test_a_stage_that_trains_nothing_is_refused() -> None:
    asked = ["model=mlp", "parallelism.data=2", "parallelism.pipeline=2", "schedule.microbatches=4"]
    asked += ["partition=manual", "partition.boundaries=[4]", "trainer.freeze=[0.*,1.*,2.*,3.*]"]
    make_plan(config := resolve(asked), profile_model(config))
    config = resolve([*asked, "zero.stage=1"])
    with pytest.raises(RequestError, match="must be 0 where a stage trains nothing"):
        make_plan(config, profile_model(config))


class TestTheDeepSpeedConfiguration:
    def settings(self, *overrides: str, accelerated: bool = False) -> dict[str, Any]:
        return deepspeed_settings(resolve([*BASE, *overrides]), accelerated=accelerated)

    def test_the_runner_accumulates_scales_and_logs(self) -> None:
        made = self.settings("zero.stage=2", "schedule.microbatches=4", "trainer.grad_clip_norm=0.5")
        assert made["gradient_accumulation_steps"] == 1
        assert made["gradient_clipping"] == 0.5
        assert "optimizer" not in made
        assert "scheduler" not in made

    @pytest.mark.parametrize(
        ("precision", "expected"),
        [
            ("fp32", {}),
            ("bf16_mixed", {}),
            ("bf16", {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}),
            ("bf16_master", {"enabled": True, "bf16_master_weights_and_grads": False, "bf16_optimizer_states": False}),
        ],
    )
    def test_precision(self, precision: str, expected: dict[str, bool]) -> None:
        made = self.settings("zero.stage=1", f"precision={precision}").get("bf16", {})
        assert {key: value for key, value in made.items() if key != "check_grad_overflow"} == expected

    def test_offload(self) -> None:
        asked = ("zero.stage=3", "offload.optimizer=nvme", "offload.nvme_path=/drive", "offload.parameters=cpu")
        zero = self.settings(*asked, accelerated=True)["zero_optimization"]
        assert zero["offload_optimizer"] == {"device": "nvme", "pin_memory": True, "nvme_path": "/drive"}
        assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}

    def written(self, tmp_path: Path, document: dict[str, Any]) -> str:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        return f"zero.config={path}"

    def test_a_file_that_agrees_is_taken_over(self, tmp_path: Path) -> None:
        asked = self.written(
            tmp_path,
            {
                "train_batch_size": 32,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": "auto",
                "zero_optimization": {"stage": 2, "round_robin_gradients": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            },
        )
        overrides = ("zero.stage=2", "schedule.microbatches=2", asked)
        assert problems(overrides) == []
        made = self.settings(*overrides)
        assert made["zero_optimization"]["round_robin_gradients"] is True
        assert made["zero_optimization"]["stage"] == 2

    @pytest.mark.parametrize(
        ("document", "key", "own"),
        [
            ({"train_batch_size": 64}, "train_batch_size", "data.batch_size = 32"),
            ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "schedule.microbatches = 1"),
            ({"gradient_clipping": 1.0}, "gradient_clipping", "trainer.grad_clip_norm = None"),
            ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage", "zero.stage = 2"),
            ({"bf16": {"enabled": True}}, "bf16.enabled", "precision = fp32"),
            ({"optimizer": {"params": {"lr": 0.5}}}, "optimizer.params.lr", "optimizer.lr = 0.001"),
            (
                {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
                "zero_optimization.offload_optimizer.device",
                "offload.optimizer = none",
            ),
        ],
    )
    def test_a_contradiction_names_both_paths(
        self, tmp_path: Path, document: dict[str, Any], key: str, own: str
    ) -> None:
        (problem,) = problems(["zero.stage=2", self.written(tmp_path, document)])
        assert problem.path.endswith(f"ds.json:{key}")
        assert own in problem.rule

    def test_keys_that_nobody_knows_and_schedulers_are_refused(self, tmp_path: Path) -> None:
        document = {"gradient_cliping": 1.0, "scheduler": {"type": "WarmupLR"}}
        first, second = problems(["zero.stage=2", self.written(tmp_path, document)])
        assert "gradient_clipping" in first.fix
        assert "lr_scheduler" in second.rule

    def test_a_file_that_is_not_there(self) -> None:
        (problem,) = problems(["zero.stage=2", "zero.config=nowhere.json"])
        assert problem.path == "zero.config"


def test_the_documents_table_is_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "zero.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `") and "=" not in line.split(" | ")[0]]
    rows = [row for row in rows if row.count(" | ") == 3]
    assert rows == [f"| `{row.path}` | {row.rule} | {row.why} | {row.source} |" for row in ROWS]
