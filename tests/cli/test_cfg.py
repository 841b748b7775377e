"""``--cfg job``: the resolved request as YAML, and what set each key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from runner.cli.main import main
from runner.config.compose.resolve import resolve, to_container


@pytest.fixture(autouse=True)
def _own_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "recipe/mine": "# @package _global_\ndefaults:\n  - override /model: wide\n  - override /optimizer: sgd\n"
        "optimizer: {lr: 0.5}\ntrainer: {max_steps: 7}\n",
        "model/wide": "target: runner.zoo.mlp:build\nkwargs: {width: 16, depth: 3}\ngoes_with: {}\n",
    }
    for name, text in files.items():
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def source_of(text: str, key: str) -> str:
    (found,) = re.findall(rf"^ *{key}: .*?  # (.*)$", text, re.MULTILINE)
    return str(found)


REQUEST = ("recipe=mine", "model.kwargs.depth=4", "data=random_regression", "loss=mse", "optimizer.momentum=0.9")


def test_it_is_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "verify", *REQUEST, "--cfg", "job")
    assert yaml.safe_load(text) == to_container(resolve(REQUEST))
    assert not Path("outputs").exists()


def test_every_key_has_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "train", *REQUEST, "-c", "job")
    leaves = [line for line in text.splitlines() if not line.endswith(":")]
    assert all("  # " in line for line in leaves)
    assert source_of(text, "compile") == "default"
    assert source_of(text, "lr") == source_of(text, "max_steps") == "conf/recipe/mine.yaml"
    assert source_of(text, "width") == "conf/model/wide.yaml"
    assert source_of(text, "depth") == "model.kwargs.depth=4"
    assert source_of(text, "momentum") == "optimizer.momentum=0.9"
    assert "  name: sgd                                   # runner/conf/optimizer/sgd.yaml" in text.splitlines()


def test_an_option_of_the_command_line_lies_over_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "train", "recipe=rudalle_tiny", "parallelism=single", "--cfg", "job")
    assert source_of(text, "pipeline") == "runner/conf/parallelism/single.yaml"


def test_a_sweep_has_a_document_for_each_job(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "train", "-m", "model=mlp", "seed=1,2", "--cfg", "job")
    assert [each["seed"] for each in yaml.safe_load_all(text)] == [1, 2]
    assert "# model=mlp seed=2" in text.splitlines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "--cfg", "hydra", "model=mlp"), "--cfg = hydra: must be job. It prints the request. Try --cfg job."),
        (("train", "--cfg", "job", "model=mlp", "sede=1"), "sede = 1: there is no such key. Try seed=1."),
        (("train", "--cfg", "job", "model=mlp", "trainer.threads=0"), "trainer.threads = 0: must be at least 1."),
    ],
)
def test_a_wrong_request_is_told(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(words)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
