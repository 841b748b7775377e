"""A user's own conf/ in the working directory adds options; a mistake in it is named with its file."""

# ruff: noqa: E501 - a row of a table stays in one line

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.compose.groups import shipped_conf
from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.optim.catalogue.registry import OPTIMIZERS


def write(directory: Path, option: str, text: str) -> Path:
    path = directory / "conf" / f"{option}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refused(directory: Path, *overrides: str) -> str:
    with pytest.raises(RequestError) as caught:
        resolve(overrides, working_directory=directory)
    return str(caught.value)


def test_an_option_of_the_user(tmp_path: Path) -> None:
    write(tmp_path, "model/mine", "target: mine:build\nkwargs: {width: 3}\ngoes_with: {data: mine, loss: mse}\n")
    write(tmp_path, "data/mine", "target: mine:data\n")
    config = resolve(["model=mine", "model.kwargs.depth=2"], working_directory=tmp_path)
    assert (config.model.target, config.model.kwargs) == ("mine:build", {"width": 3, "depth": 2})
    assert (config.data.target, config.loss.name) == ("mine:data", "mse")


def test_options_may_lie_in_folders(tmp_path: Path) -> None:
    write(tmp_path, "optimizer/vision/slow", "name: sgd\nlr: 1e-4\n")
    assert resolve(["model=gpt", "optimizer=vision/slow"], working_directory=tmp_path).optimizer.lr == 1e-4


def test_a_recipe_of_the_user_lies_over_options_and_under_the_command_line(tmp_path: Path) -> None:
    text = """# @package _global_
defaults:
  - override /model: mlp
  - override /optimizer: sgd
name: mine
optimizer: {lr: 0.5, weight_decay: 0.1}
parallelism: {pipeline: 2}
"""
    write(tmp_path, "recipe/mine", text)
    config = resolve(["recipe=mine", "optimizer.weight_decay=0.2"], working_directory=tmp_path)
    assert (config.name, config.model.name, config.optimizer.name) == ("mine", "mlp", "sgd")
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.parallelism.pipeline) == (0.5, 0.2, 2)
    config = resolve(["recipe=mine", "parallelism=single", "optimizer=adamw"], working_directory=tmp_path)
    assert (config.parallelism.pipeline, config.optimizer.name, config.optimizer.lr) == (1, "adamw", 1e-3)


@pytest.mark.parametrize(
    ("option", "text", "match"),
    [
        ("model/mine", "target: a:b\nkwrgs: {}\n", "mine.yaml: model.kwrgs = {}: there is no such key. Try model.kwargs={}."),
        ("model/mine", "target: [a\n", "mine.yaml = model: no valid YAML at line 2, column 1"),
        ("model/mine", "- a\n", "mine.yaml = model: it must be a mapping of keys"),
        ("model/mine", "goes_with: [a]\n", "mine.yaml: model.goes_with = [a]: must be a mapping of names to values"),
        ("model/mine", "defaults: 3\n", "mine.yaml: defaults = 3: must be a list"),
        ("model/mine", "defaults: [gtp]\n", "mine.yaml: defaults = gtp: there is no such option"),
        ("model/mine", "# @package modle\na: 1\n", "mine.yaml = modle: there is no such section to put its keys in"),
        ("data/mine", "batch_size: many\n", "mine.yaml: data.batch_size = many: must be a whole number. It is text"),
        ("recipe/mine", "seed: 3\n", "mine.yaml = recipe: a recipe's first line is `# @package _global_`"),
        ("recipe/mine", "# @package _global_\nsede: 3\n", "mine.yaml: sede = 3: there is no such key. Try seed=3."),
        (
            "recipe/mine",
            "# @package _global_\ndefaults:\n  - override /optimizer: adm\n",
            f"mine.yaml: optimizer = adm: there is no such option. optimizer has {', '.join(sorted(OPTIMIZERS))}. Try optimizer: adam.",
        ),
        (
            "recipe/mine",
            "# @package _global_\ndefaults:\n  - override /optimiser: adam\n",
            "mine.yaml: defaults = override /optimiser: there is no such group. Did you mean optimizer.",
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named_with_the_file(tmp_path: Path, option: str, text: str, match: str) -> None:
    path = write(tmp_path, option, text)
    group = option.partition("/")[0]
    told = refused(tmp_path, f"{group}=mine")
    assert str(path) in told
    assert match in told


def test_mistakes_in_several_files_are_told_at_once(tmp_path: Path) -> None:
    write(tmp_path, "model/mine", "a: 1\nb: 2\n")
    write(tmp_path, "data/mine", "shuffle: 3\n")
    told = refused(tmp_path, "model=mine", "data=mine").splitlines()
    assert len(told) == 3


def test_a_file_that_a_recipe_chooses_is_checked_too(tmp_path: Path) -> None:
    write(tmp_path, "recipe/mine", "# @package _global_\ndefaults:\n  - override /data: mine\n")
    write(tmp_path, "data/mine", "target: a:b\nshufle: true\n")
    assert "mine.yaml: data.shufle = true: there is no such key. Try data.shuffle=true." in refused(
        tmp_path, "recipe=mine"
    )


def test_a_file_with_a_shipped_name_wins_nothing_silently(tmp_path: Path) -> None:
    write(tmp_path, "model/gpt", "target: mine:build\n")
    assert "model = gpt: two files have this name" in refused(tmp_path, "model=gpt")
    write(tmp_path, "model/gpt", (shipped_conf() / "model" / "gpt.yaml").read_text(encoding="utf-8"))
    assert resolve(["model=gpt"], working_directory=tmp_path).model.target == "runner.zoo.gpt:build"


def test_files_of_the_user_that_are_not_chosen_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path, "model/broken", "a: [\n")
    write(tmp_path, "config", "defaults: [nothing]\n")
    write(tmp_path, "callbacks/many", "x: 1\n")
    assert resolve(["model=gpt"], working_directory=tmp_path).model.name == "gpt"
