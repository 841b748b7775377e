"""``runner plan`` tells and draws what other budgets for activations would cost, by strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from plan_command import gpt, in_own_place

from runner.cli.main import main

GPT = gpt(layers=6)


@pytest.fixture(autouse=True)
def _own_place(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_own_place(tmp_path_factory, tmp_path, monkeypatch)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *GPT, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def limit(capsys: pytest.CaptureFixture[str]) -> int:
    return int(0.7 * max(planned(capsys)["peak_memory_bytes"]))


@pytest.mark.costly
def test_the_front_is_told_for_each_strategy_and_drawn(capsys: pytest.CaptureFixture[str], limit: int) -> None:
    words = ("activation_checkpoint=auto", f"memory_limit={limit}")
    (choice,) = planned(capsys, *words, "--svg", "front.svg")["activation_choices"]
    fronts = choice["fronts"]
    assert {"none", "full", "rotor", "revolve"} - fronts.keys() == set()
    for name, offers in fronts.items():
        assert all(offer["name"].split()[0] == name for offer in offers)
        assert [offer["seconds"] for offer in offers] == sorted(offer["seconds"] for offer in offers)
        assert [offer["peak_bytes"] for offer in offers] == sorted((o["peak_bytes"] for o in offers), reverse=True)
    everything = [offer for offers in fronts.values() for offer in offers]
    for offer in choice["front"]:
        assert not any(
            each["seconds"] < offer["seconds"] and each["peak_bytes"] <= offer["peak_bytes"] for each in everything
        )
    drawn = {text.text for text in ElementTree.parse("front.svg").iter("{http://www.w3.org/2000/svg}text")}
    assert {*fronts, f"taken: {choice['chosen']['name']}", "budget", "time, 1.00 if all are kept"} <= drawn
    assert main(["plan", *GPT, *words]) == 0
    told = " ".join(capsys.readouterr().out.split())  # a title may be folded
    assert "stage 0: time by bytes for activations, 1.00 if all are kept" in told


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--svg", "a.svg"), "--svg = a.svg: has nothing to draw. No policy of this plan chooses"),
        (("--svg", "/nowhere/a.svg"), "--svg = /nowhere/a.svg: must be a file in a folder that exists. Try --svg a"),
        (("-m", "seed=0,1", "--svg", "a.svg"), "--svg = a.svg: takes one plan. The picture shows one stage of it."),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_one_line(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *GPT, *words]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith(line)
    assert not Path("a.svg").exists()
