"""A package that a request needs and that is not installed is one line, with a command that installs it."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.launch.doctor import rows as doctor
from runner.launch.needs import packages
from runner.launch.needs.packages import missing_for_plan, missing_packages
from runner.optim.catalogue.registry import OPTIMIZERS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TINY = ("model=mlp", "data.batch_size=8", "trainer.max_steps=1", "logger=none", "trainer.progress=false")
Hide = Callable[..., None]


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Hide:
    """Makes packages look as if they were not installed."""
    find: Callable[..., ModuleSpec | None] = importlib.util.find_spec

    def hidden(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in names else find(name))

    return hidden


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[]", requirement)[0].strip().lower() for requirement in requirements}


def test_what_options_need_comes_with_the_first_install() -> None:
    """Every optimizer's package, DeepSpeed of ``zero.stage``, and what compiles its operators."""
    needed = {kind.package for kind in OPTIMIZERS.values() if kind.package is not None}
    assert {*needed, "deepspeed", "ninja"} <= names_of(PROJECT["dependencies"])


def test_the_index_has_no_other_project_of_this_name() -> None:
    """The name is not that of the package, which another project has on the index; the command keeps its own."""
    assert PROJECT["name"] == "stage-runner"
    assert PROJECT["scripts"] == {"runner": "runner.cli.main:main"}


def test_every_extra_that_is_named_exists_and_no_text_installs_the_other_project() -> None:
    texts = [ROOT / "README.md", ROOT / ".ci" / "run"]
    for folder, suffix in (("docs", "*.md"), ("runner", "*.py"), ("conf", "*.yaml"), ("recipes", "*.md")):
        texts += (ROOT / folder).rglob(suffix)
    named: set[str] = set()
    for path in texts:
        text = path.read_text(encoding="utf-8")
        assert "pip install runner" not in text, path
        assert "'runner[" not in text, path
        named |= set(re.findall(r"'\.\[(\w+)\]'", text))
    assert named == set(PROJECT["optional-dependencies"])


def test_a_plan_says_in_one_line_what_is_missing(hide: Hide, capsys: pytest.CaptureFixture[str]) -> None:
    hide("bitsandbytes")
    assert main(["plan", "model=mlp", "optimizer=adam8bit"]) == 2
    line = "optimizer.name = adam8bit: needs bitsandbytes, which is not installed. Try pip install bitsandbytes."
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_plan_for_another_machine_needs_no_optimizer(hide: Hide) -> None:
    hide("bitsandbytes")
    assert missing_for_plan(resolve(["model=mlp", "optimizer=adam8bit", "hardware=a100_80gb"])) == {}


def test_every_package_of_a_request_is_told_once(hide: Hide, monkeypatch: pytest.MonkeyPatch) -> None:
    hide("deepspeed")
    monkeypatch.setattr(packages, "has_ninja", lambda: False)
    request = ["model=mlp", "parallelism.data=2", "optimizer=cpu_adam", "zero.stage=2"]
    assert missing_packages(resolve(request)).keys() == {"deepspeed", "ninja"}
    assert missing_packages(resolve(["model=mlp", "optimizer=adamw"])) == {}


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_sweep_tells_it_before_its_first_job(
    command: str, hide: Hide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hide("bitsandbytes")
    assert main([command, "-m", *TINY, "optimizer=adamw,adam8bit", "optimizer.lr=1e-3,1e-2"]) == 2
    shown = capsys.readouterr()
    line = "optimizer.name = adam8bit: needs bitsandbytes, which is not installed. Try pip install bitsandbytes."
    assert shown.err.splitlines() == [line]
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_on_a_cluster_leaves_it_to_its_machines(hide: Hide) -> None:
    from runner.launch.sweep.jobs import Request
    from runner.launch.sweep.run import _missing

    hide("bitsandbytes")
    words = ("model=mlp", "optimizer=adam8bit")
    assert list(_missing([Request(words, resolve([*words, "launcher=slurm"]))])) == []
    assert len(list(_missing([Request(words, resolve(words))]))) == 1


def test_the_doctor_names_what_options_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    rows = {row.name: row for row in doctor._libraries()}
    assert rows["bitsandbytes"].fix == "pip install bitsandbytes, for optimizer=adam8bit"
    uses = "zero.stage and optimizer=cpu_adam and optimizer=fused_adam"
    assert rows["deepspeed"].fix == f"pip install deepspeed, for {uses}"
    assert not any(row.needed for row in rows.values())


@pytest.mark.costly
def test_a_sweep_whose_every_job_is_refused_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = ["train", "-m", *TINY, "run_dir=s", "parallelism.pipeline=98,99"]
    assert main(wanted) == 2
    assert [json.loads((tmp_path / f"s/{job}/record.json").read_text())["status"] for job in range(2)] == [
        "unsupported",
        "unsupported",
    ]
