"""A slip in the name of a section or of a mapping is told with the key that was meant."""

from __future__ import annotations

import pytest

from runner.config.compose.shape import unknown_key


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("mertics.x", "metrics.x"),
        ("model.kwarsg.depth", "model.kwargs.depth"),
        ("callbaks.early.target", "callbacks.early.target"),
        ("callbacks.early.targte", "callbacks.early.target"),
        ("mertics.file", "metrics.file"),  # and not schedule.file
        ("tranier.max_stesp", "trainer.max_steps"),
    ],
)
def test_every_name_of_a_path_is_looked_at(asked: str, meant: str) -> None:
    assert unknown_key(asked, 3).fix == f"{meant}=3"


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("trainer.steps", "trainer.max_steps"),  # and not schedule.steps
        ("launcher.gpus", "launcher.gpus_per_node"),  # and not parallelism.data, which is `gpus` elsewhere
        ("gpus", "parallelism.data"),
        ("trainer.clip", ""),  # by norm or by value
        ("launcher.wait_seconds", ""),
    ],
)
def test_a_part_of_a_name_means_the_key_of_its_own_section(asked: str, meant: str) -> None:
    assert unknown_key(asked, 8).fix == (f"{meant}=8" if meant else "")


@pytest.mark.parametrize("asked", ["figures.x", "metrics", "mdoel", "callbaks.early"])
def test_what_is_no_slip_of_a_key_has_no_hint(asked: str) -> None:
    assert unknown_key(asked, 3).fix == ""


def test_a_section_of_a_file_is_told_as_a_section() -> None:
    problem = unknown_key("paralelism", {"pipeline": 2, "data": None})
    assert problem.fix == "parallelism: {pipeline: 2, data: null}"
    assert unknown_key("nowhere", {"pipeline": 2}).fix == ""
