"""A configuration as a file and as an identity."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from quick_config import changed

from runner.config.compose.container import config_from_container, fingerprint, load, save, to_container
from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.errors import RequestError


@pytest.fixture(scope="module")
def config() -> RunConfig:
    lines = [
        "model=gpt",
        "optimizer.lr=1e-5",
        "model.kwargs.text='a: [b]'",
        "hardware=a100_80gb",
        "partition.boundaries=[2]",
        "partition.migrate={3: [1]}",
    ]
    return resolve(lines)


@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
def test_a_saved_configuration_is_read_back_equal(config: RunConfig, tmp_path: Path, name: str) -> None:
    assert load(save(config, tmp_path / name)) == config


def test_a_container_is_json_and_goes_both_ways(config: RunConfig) -> None:
    container = json.loads(json.dumps(to_container(config)))
    assert config_from_container(container) == config
    assert config_from_container({}) == RunConfig()


def test_an_option_that_calls_nothing_yet_survives() -> None:
    assert config_from_container({"model": {"target": "???"}}).model.target == "???"


def test_all_mistakes_of_a_container_are_told() -> None:
    with pytest.raises(RequestError) as caught:
        config_from_container({"sede": 1, "model": {"target": 1.5, "kwrgs": {}}, "seed": "x", "trainer": 3})
    assert [problem.path for problem in caught.value.problems] == ["sede", "model.kwrgs", "seed", "trainer"]


@pytest.mark.parametrize(
    ("text", "match"),
    [("a: [", "cannot be read"), ("- 1", "must hold a mapping"), ("seed: x", "must be a whole number")],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=match):
        load(file)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"config\.json = : cannot be read"):
        load(tmp_path / "config.json")


def test_what_changes_no_weight_changes_no_fingerprint(config: RunConfig) -> None:
    words = ("name=other", "run_dir=/x", "logger.name=csv", "trainer.progress=false", "checkpoint.every=3")
    for word in (*words, "data.workers=2"):
        assert fingerprint(changed(config, word)) == fingerprint(config), word


def test_what_changes_the_result_changes_the_fingerprint(config: RunConfig) -> None:
    words = ("seed=1", "model.kwargs.width=64", "schedule.name=gpipe", "parallelism.data=2", "trainer.max_steps=3")
    for word in words:
        assert fingerprint(changed(config, word)) != fingerprint(config), word


def test_a_fingerprint_leaves_the_configuration_alone(config: RunConfig) -> None:
    before = to_container(config)
    fingerprint(config)
    assert to_container(config) == before
    assert len(fingerprint(replace(config, seed=3))) == 64
