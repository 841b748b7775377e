"""What each optimizer says of itself: the facts that plans, rules and launch were made of before it did."""

# ruff: noqa: E501 - a row of a table stays in one line

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from compressor_keys import examples_of, section_with

from runner.config.compose.resolve import resolve
from runner.config.schema import CompressionConfig, OptimizerConfig
from runner.errors import RequestError
from runner.launch.local.template import imports_of
from runner.optim.build import measure_step_seconds_per_byte
from runner.optim.catalogue.compression import CompressionKind, Wire
from runner.optim.catalogue.found import find_kinds
from runner.optim.catalogue.kind import OptimizerKind
from runner.optim.catalogue.registry import (
    OPTIMIZERS,
    compression_of,
    find_optimizer,
    optimizer_of,
    target_problems,
)

CPU = torch.device("cpu")

SIZES = (100, 4096, 5000, 12800)

# values, decoupled, package, operator, elementwise, compresses, curvature, bytes of tensors of SIZES, constant
# bytes, temporaries of a step
FACTS = {
    "adamw": (2.0, True, None, None, True, False, False, None, 0, 2),
    "adam": (2.0, None, None, None, True, False, False, None, 0, 2),
    "sgd": (0.0, False, None, None, True, False, False, None, 0, 0),
    "auto": (2.0, True, None, None, True, False, False, None, 0, 2),
    "adam8bit": (2.0, True, "bitsandbytes", None, True, False, False, [800, 8320, 10160, 26000], 2048, 2),
    "adam4bit": (2.0, True, "torchao", None, False, False, False, [800, 4352, 40000, 13600], 0, 6),
    "adam_fp8": (2.0, True, "torchao", None, False, False, False, [800, 8320, 40000, 26000], 0, 6),
    "cpu_adam": (2.0, None, "deepspeed", "cpu_adam", True, False, False, None, 0, 2),
    "fused_adam": (2.0, None, "deepspeed", "fused_adam", True, False, False, None, 0, 2),
    "lars": (0.0, False, "pytorch_optimizer", None, False, False, False, None, 0, 2),
    "lamb": (2.0, True, "pytorch_optimizer", None, False, False, False, None, 0, 1),
    "adabelief": (2.0, True, "pytorch_optimizer", None, False, False, False, None, 0, 2),
    "rmsprop": (1.0, False, None, None, True, False, False, None, 0, 1),
    "muon": (None, True, None, None, False, False, False, None, 0, 1),
    "custom": (None, None, None, None, False, False, False, None, 0, 2),  # its states are seen at a step
    "kfac": (0.0, False, None, None, False, False, True, None, 0, 3),
    "onebit_adam": (2.0, True, None, None, False, True, False, [800, 32768, 40000, 102400], 0, 2),
    "onebit_adam_refreshed": (2.0, True, None, None, False, True, False, [800, 32768, 40000, 102400], 0, 2),
    "onebit_lamb": (3.0, True, None, None, False, True, False, [1200, 49152, 60000, 153600], 0, 2),
}
KIN_OF_ADAM = {
    "adamw", "adam", "auto", "adam8bit", "adam4bit", "adam_fp8", "cpu_adam", "fused_adam", "lamb", "onebit_adam",
    "onebit_adam_refreshed", "onebit_lamb", "adabelief", "muon",
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_facts_are_what_they_were(name: str) -> None:
    kind = OPTIMIZERS[name]
    sizes = [kind.state_bytes(size) for size in SIZES] if kind.state_bytes is not None else None
    found = (kind.values, kind.decoupled, kind.package, kind.operator, kind.elementwise, kind.compresses)
    assert (*found, kind.watch is not None, sizes, kind.constant_bytes, kind.temporaries) == FACTS[name]
    assert kind.is_kin_of_adam == (name in KIN_OF_ADAM)


def test_other_rooms_facts_are_what_they_were() -> None:
    def those(holds: object) -> set[str]:
        return {name for name, kind in OPTIMIZERS.items() if holds(kind)}  # type: ignore[operator]

    assert set(OPTIMIZERS) == set(FACTS)
    assert those(lambda kind: kind.by_weight) == {"adamw", "adam", "sgd", "auto"}
    assert those(lambda kind: kind.place == "device") == {"adam8bit", "fused_adam"}
    assert those(lambda kind: kind.place == "host") == {"cpu_adam"}
    assert {name: dict(kind.brings) for name, kind in OPTIMIZERS.items() if kind.brings} == {
        "cpu_adam": {"offload": "optimizer_cpu"}
    }
    assert those(lambda kind: "momentum" in kind.reads) == {"sgd", "lars", "kfac", "muon"}
    assert those(lambda kind: kind.counts_steps == "number") == {"adam8bit", "cpu_adam", "fused_adam"}


def test_the_imports_that_ranks_share_name_every_library() -> None:
    """The optimizer of 8 bits and the fused one were left out where they stood in a list."""
    config = resolve(["model=mlp", "zero.stage=null"])
    for name, kind in OPTIMIZERS.items():
        config.optimizer = OptimizerConfig(name=name, target="torch.optim:SGD" if name == "custom" else None)
        assert imports_of(config, "runner.training.run:run_rank") == ["runner.training.run", *kind.imports]
        assert bool(kind.imports) == (kind.package is not None)


@pytest.mark.costly
def test_a_rank_that_makes_an_optimizer_finds_its_library_imported() -> None:
    """And the process that ranks are forked from has one thread still: else they are not forked from it."""
    kinds = [kind for kind in OPTIMIZERS.values() if kind.package is not None]
    packages = sorted({str(kind.package) for kind in kinds})
    imports = sorted({each for kind in kinds for each in kind.imports})
    code = f"""
import importlib, json, os, sys
from runner.launch.local.template import import_all
import_all({imports!r})
print(json.dumps([[each for each in {packages!r} if each in sys.modules], len(os.listdir("/proc/self/task"))]))
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as ranks have it; else a library starts one for each core
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1500, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [packages, 1]


def test_two_kinds_of_one_name_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("first", "second"):
        text = "from runner.optim.catalogue.kind import OptimizerKind\nKIND = OptimizerKind(name='same', description='', make=print)\n"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    package = types.ModuleType("kinds_of_a_test")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "kinds_of_a_test", package)
    with pytest.raises(ValueError, match="another file has a OptimizerKind named same"):
        find_kinds(package, OptimizerKind)
    (tmp_path / "second.py").unlink()
    for name in ("first", "second"):
        monkeypatch.delitem(sys.modules, f"kinds_of_a_test.{name}", raising=False)
    assert list(find_kinds(package, OptimizerKind)) == ["same"]


MINE = OptimizerKind(name="any", description="", make=lambda section, parameters: None)  # type: ignore[arg-type, return-value]


def test_a_users_kind_has_the_name_of_its_option() -> None:
    kind = optimizer_of(OptimizerConfig(name="mine", target=f"{__name__}:MINE"))
    assert (kind.name, kind.values, kind.elementwise) == ("mine", None, False)
    assert list(target_problems(optimizer_of, OptimizerConfig(name="mine", target=f"{__name__}:MINE"))) == []


def test_what_a_target_names_in_vain_is_told() -> None:
    section = OptimizerConfig(name="mine", target=f"{__name__}:MIN")
    (problem,) = target_problems(optimizer_of, section)
    assert problem.path == "optimizer.target"
    assert problem.fix == f"optimizer.target={__name__}:MINE"
    assert find_optimizer(section) is None
    (problem,) = target_problems(compression_of, CompressionConfig(name="mine", target="no_such_module:KIND"))
    assert "No module named 'no_such_module'" in problem.why
    with pytest.raises(RequestError, match="compression.target"):
        compression_of(CompressionConfig(name="mine", target=f"{__name__}:SIZES"))


def test_a_new_file_is_all_that_a_kind_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is found is found by looking: a further module of the package is met without a line elsewhere."""
    from runner.optim.catalogue import optimizers

    text = "from runner.optim.catalogue.kind import OptimizerKind\nKIND = OptimizerKind(name='new', description='', make=print)\n"
    (tmp_path / "of_a_test.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(optimizers, "__path__", [*optimizers.__path__, str(tmp_path)])
    assert set(find_kinds(optimizers, OptimizerKind)) == {*OPTIMIZERS, "new"}
    monkeypatch.delitem(sys.modules, f"{optimizers.__name__}.of_a_test")


def test_compression_none_is_a_kind_as_well() -> None:
    kind = compression_of(CompressionConfig())
    assert isinstance(kind, CompressionKind)
    assert kind.bytes_in_a_step(Wire(CompressionConfig(), [(10, 10)], 4, 4)) == 600.0
    assert not kind.has_residuals(CompressionConfig())


def test_examples_of_a_compressors_own_keys_are_given_in_kwargs() -> None:
    examples = {"factor": (0.5, 1.0), "rank": (2,)}
    kind = CompressionKind(name="new", description="", keys={"factor": 1.0}, reads=("rank",), examples=examples)
    assert [kind.place_of(key) for key in examples] == ["kwargs.factor", "rank"]
    section = section_with(kind, **examples_of(kind))
    assert (kind.settings(section), section.rank) == ({"factor": 0.5}, 2)


@pytest.mark.parametrize("name", [name for name in FACTS if name != "custom"])
def test_a_step_of_every_optimizer_can_be_timed(name: str) -> None:
    kind = OPTIMIZERS[name]
    if kind.operator is not None and not torch.cuda.is_available() and name == "fused_adam":
        pytest.skip("no CUDA device")
    assert measure_step_seconds_per_byte(resolve([f"optimizer={name}"]), torch.float32, CPU) > 0
