"""What is refused, before anything runs, and with which words."""

from __future__ import annotations

from typing import Any

import pytest
from plan_profiles import layer, model

from runner.config.rules.memory import MEMORY
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.memory.solve.policies import policy_problems
from runner.memory.solve.save_ops import SaveChoice
from runner.memory.solve.values import PolicyOptions
from runner.model.compiled import compile_problems
from runner.plan.make import make_plan
from runner.plan.rules.tables import order_problems
from runner.schedule.values import Action, Op, Schedule


def request(**section: Any) -> RunConfig:
    config = RunConfig()
    for key, value in section.items():
        setattr(config.activation_checkpoint, key, value)
    return config


def lines(config: RunConfig) -> list[str]:
    return [problem.line() for problem in MEMORY.problems(config)]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"name": "periodic"}, "activation_checkpoint.every = null: must be given."),
        ({"name": "periodic", "every": 0}, "activation_checkpoint.every = 0: must be at least 1."),
        ({"name": "full", "every": 2}, "activation_checkpoint.every = 2: belongs to activation_checkpoint=periodic."),
        ({"layers": ["3"]}, "activation_checkpoint.layers = [3]: belongs to activation_checkpoint=manual."),
        ({"name": "selective"}, "activation_checkpoint.save_ops = null: must be given."),
        ({"name": "selective", "save_ops": "matmul"}, "activation_checkpoint.save_ops = matmul: must be one of"),
        ({"name": "manual"}, "activation_checkpoint.layers = null: must be given."),
        ({"name": "manual", "layers": []}, "activation_checkpoint.layers = []: must name at least one layer."),
        ({"name": "revolve", "slots": 0}, "activation_checkpoint.slots = 0: must be at least 1."),
        ({"name": "full", "slots": 2}, "activation_checkpoint.slots = 2: belongs to activation_checkpoint=het_time or"),
        ({"name": "bisect", "leaf": 0}, "activation_checkpoint.leaf = 0: must be at least 1."),
        ({"name": "chen_recursive", "cuts": 0}, "activation_checkpoint.cuts = 0: must be at least 1."),
        (
            {"name": "bptt", "states": 3, "variant": "mms"},
            "activation_checkpoint.variant = mms: must be one of hsm, ism",
        ),
    ],
)
def test_wrong_options_are_told_alone(section: dict[str, object], expected: str) -> None:
    (found,) = lines(request(**section))
    assert found.startswith(expected)
    assert "Try " in found


def test_combinations_that_cannot_be_are_refused_with_the_reason() -> None:
    config = request(name="selective", save_ops="matmuls")
    config.offload.activations = "save_on_cpu"
    config.compile = True
    moved, compiled = lines(config)
    assert "would stay on the device" in moved
    assert "compiled layer has none" in compiled
    config.activation_checkpoint = request(name="full").activation_checkpoint
    assert lines(config) == []


def test_an_unknown_layer_is_told_with_the_nearest_name() -> None:
    (problem,) = policy_problems(PolicyOptions("manual", layers=("stem", "blok1", "2")), ["stem", "block1", "head"])
    assert problem.value == "blok1"
    assert problem.fix == "activation_checkpoint.layers=[block1]"
    (problem,) = policy_problems(PolicyOptions("manual", layers=("3",)), ["stem", "block1", "head"])
    assert "an index from 0 to 2" in problem.why
    with pytest.raises(RequestError, match="activation_checkpoint.layers = nowhere"):
        make_plan(request(name="manual", layers=["nowhere"]), model([layer()] * 2))


def test_a_split_backward_refuses_compiled_layers_and_takes_those_that_run_again() -> None:
    actions = tuple(Action(op, 0, 0) for op in (Op.F, Op.I, Op.W))
    split = Schedule(name="split", actions=(actions,), placement=((0,),), pipeline_of_microbatch=(0,), chunks=1)
    config = request(name="full")
    config.compile = True
    paths = [problem.path for problem in order_problems(config, split, 1)]
    assert paths == ["compile"]
    assert order_problems(RunConfig(), split, 1) == []
    whole = Schedule(
        name="whole",
        actions=((Action(Op.F, 0, 0), Action(Op.B, 0, 0)),),
        placement=((0,),),
        pipeline_of_microbatch=(0,),
        chunks=1,
    )
    assert order_problems(config, whole, 1) == []


def test_compiled_layers_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    (problem,) = compile_problems(True, cuda=False)
    assert "no c++, g++ or clang++" in problem.why
    assert compile_problems(False, cuda=False) == []


def test_every_second_matmul_counts_matmuls_alone() -> None:
    choice = SaveChoice("every_second_matmul")
    ran = ["aten::mm", "aten::add", "aten::addmm", "aten::bmm", "aten::mm"]
    assert [choice.keeps(name) for name in ran] == [False, False, True, False, True]
