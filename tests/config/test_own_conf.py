"""A user's own conf/: whose arguments reach which function, folders that are no group, and sweeps in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.config.compose.groups import shipped_conf
from runner.config.compose.layers import Layer, without_arguments_of_others
from runner.config.compose.resolve import resolve, resolve_sweep
from runner.errors import RequestError

RECIPE = "# @package _global_\ndefaults:\n  - override /model: mlp\n"


def write(directory: Path, option: str, text: str) -> Path:
    path = directory / "conf" / f"{option}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def resolve_jobs(directory: Path, overrides: Sequence[str]) -> None:
    for job in resolve_sweep(overrides, working_directory=directory):
        resolve(job, working_directory=directory)


def refused(directory: Path, *overrides: str) -> str:
    with pytest.raises(RequestError) as caught:
        resolve_jobs(directory, overrides)
    return str(caught.value)


# Arguments of one function do not reach another


def model_kwargs(directory: Path, *overrides: str) -> dict[str, Any]:
    return resolve(["data=random_regression", *overrides], working_directory=directory).model.kwargs


def test_a_target_of_the_command_line_gets_only_what_stands_there(tmp_path: Path) -> None:
    write(tmp_path, "model/a", "target: mine:build\nkwargs: {width: 16, deep: {x: 1}}\nneeds: {torch: pip}\n")
    assert model_kwargs(tmp_path, "model=a", "model.kwargs.depth=2") == {"width": 16, "deep": {"x": 1}, "depth": 2}
    assert model_kwargs(tmp_path, "model=a", "model.target=mine:other") == {"deep": {}}
    for words in (
        ("model.kwargs.depth=2", "model.target=mine:other"),
        ("model.target=mine:other", "model.kwargs.depth=2"),
    ):
        assert model_kwargs(tmp_path, "model=a", *words)["depth"] == 2
    assert model_kwargs(tmp_path, "model=a", "model.target=mine:other", "model.kwargs.width=3")["width"] == 3
    assert "width" in model_kwargs(tmp_path, "model=a", "model.target=mine:build"), "it is the same function"
    assert resolve(["model=a", "model.target=mine:other"], working_directory=tmp_path).model.needs == {}


def test_a_target_of_a_recipe_gets_nothing_of_the_options_below_it(tmp_path: Path) -> None:
    write(tmp_path, "recipe/mine", f"{RECIPE}model: {{target: mine:build, kwargs: {{depth: 2}}}}\n")
    assert model_kwargs(tmp_path, "recipe=mine") == {"depth": 2}
    assert model_kwargs(tmp_path, "recipe=mine", "model.target=mine:other") == {}
    assert "depth" not in model_kwargs(tmp_path, "recipe=mine", "model=gpt")


def test_data_and_optimizer_too(tmp_path: Path) -> None:
    write(tmp_path, "optimizer/a", "target: mine:optimizer\nkwargs: {beta: 1}\n")
    config = resolve(
        ["model=gpt", "data.target=mine:data", "optimizer=a", "optimizer.target=mine:another"],
        working_directory=tmp_path,
    )
    assert (config.data.kwargs, config.optimizer.kwargs) == ({}, {})


def test_shipped_options_keep_their_arguments() -> None:
    for path in sorted((shipped_conf() / "model").glob("*.yaml")):
        if path.stem not in ("custom", "huggingface"):
            assert resolve([f"model={path.stem}", "data=random_tokens"]).model.target.startswith("runner.")
    assert resolve(["model=gpt"]).model.kwargs


@pytest.mark.parametrize(
    ("lower", "upper", "left"),
    [
        ({"a": 1, "b": 2}, {"b": 3}, {"b": 3}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"y": 3}}),
        ({"a": 5}, {"a": {"x": 1}}, {"a": {"x": 1}}),
        ({"a": {"x": 1}}, {"a": 5}, {"a": 5}),
    ],
)
def test_arguments_that_both_functions_have(lower: Any, upper: Any, left: Any) -> None:
    layers = [
        Layer("a", {"model": {"target": "m:a", "kwargs": lower}}),
        Layer("b", {"model": {"target": "m:b", "kwargs": upper}}),
    ]
    merged = {
        key: {**value, **upper[key]}
        if isinstance(value, dict) and isinstance(upper.get(key), dict)
        else upper.get(key, value)
        for key, value in lower.items()
    }
    assert without_arguments_of_others({"model": {"kwargs": merged}}, layers) == {"model": {"kwargs": left}}


# Folders that are no group


def test_an_option_in_a_misspelt_folder_is_told_with_the_nearest_group(tmp_path: Path) -> None:
    write(tmp_path, "optimzer/slow", "name: sgd\n")
    assert refused(tmp_path, "model=mlp", "optimizer=slow") == (
        "optimizer = slow: there is no such option in conf/optimizer. conf/optimzer/slow.yaml lies in a folder that is "
        "no group; the nearest group is optimizer. Try mv conf/optimzer conf/optimizer."
    )
    told = refused(tmp_path, "model=mlp", "optimzer=slow")
    assert told.startswith("optimzer = slow: there is no such group. Nobody reads the folder conf/optimzer; ")
    assert told.endswith("Try mv conf/optimzer conf/optimizer and optimizer=slow.")
    (tmp_path / "conf/optimizer").mkdir()  # into which a whole folder would be moved
    told = refused(tmp_path, "model=mlp", "optimizer=slow")
    assert told.endswith("Try mv conf/optimzer/slow.yaml conf/optimizer/.")
    told = refused(tmp_path, "model=mlp", "optimzer=slow")
    assert told.endswith("Try mv conf/optimzer/slow.yaml conf/optimizer/ and optimizer=slow.")


def test_a_file_in_a_misspelt_folder_is_not_passed_over_for_a_shipped_one(tmp_path: Path) -> None:
    write(tmp_path, "optimzer/sgd", "name: sgd\nlr: 7\n")
    assert "conf/optimzer/sgd.yaml lies in a folder that is no group" in refused(tmp_path, "model=mlp", "optimizer=sgd")
    assert resolve(["model=mlp", "optimizer=adam"], working_directory=tmp_path).optimizer.name == "adam"


def test_folders_of_other_tools_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path, "callbacks/sgd", "x: 1\n")
    assert resolve(["model=mlp", "optimizer=sgd"], working_directory=tmp_path).optimizer.name == "sgd"
    write(tmp_path, "anything/many", "x: 1\n")
    assert "conf/anything/many.yaml lies in a folder that is no group" in refused(
        tmp_path, "model=mlp", "optimizer=many"
    )


# Sweeps in a file


@pytest.mark.parametrize("many", [(), ("seed=1,2",)])
def test_a_sweep_as_text_is_refused_with_the_form_that_works(many: tuple[str, ...], tmp_path: Path) -> None:
    path = write(tmp_path, "recipe/mine", f"{RECIPE}sweep:\n  optimizer.lr: 1e-3,1e-2\n  seed: 3\n")
    assert refused(tmp_path, "recipe=mine", *many).splitlines() == [
        f"{path}: sweep.optimizer.lr = 1e-3,1e-2: must be a list. It is text. Try optimizer.lr: [1e-3, 1e-2].",
        f"{path}: sweep.seed = 3: must be a list. It is one value. Try seed: [3].",
    ]
    write(tmp_path, "recipe/mine", f"{RECIPE}sweep:\n  optimizer.lr: [1e-3, 1e-2]\n  seed: [3]\n")
    assert len(resolve_sweep(["recipe=mine"], working_directory=tmp_path)) == 2


def test_a_sweep_without_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "recipe/mine", f"{RECIPE}sweep: 1e-3,1e-2\n")
    assert refused(tmp_path, "recipe=mine") == (
        f"{path}: sweep = 1e-3,1e-2: must be keys with lists of values. It is text; e.g. "
        "`sweep: {optimizer.lr: [1e-3, 1e-2]}` makes a job for each value."
    )
