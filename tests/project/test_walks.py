"""The walks of docs/design.md: each arrow is a call of a traced run, and no call upwards is kept quiet."""

from __future__ import annotations

import re

import pytest
from test_architecture import MAY_IMPORT, ROOT, name_of, room_of
from traced_calls import calls_of

_RUNS = ("schedule=zb_h1", "schedule=pipedream")
"""What runs must have for all parts of the walks: a split backward, and late weights."""
_SMALL = "model=mlp parallelism.pipeline=2 schedule.microbatches=2 trainer.max_steps=2 logger=none"
_ARROW = re.compile(r"`([\w/]+\.py)`[^`.]*?([→↑])\s*(?=`([\w/]+\.py)`)")

Pairs = set[tuple[str, str]]


def arrows(sign: str, title: str = "") -> Pairs:
    """The pairs of files with this sign between them in the walks, or in the one with this title."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    walks = [part for part in page.split("\n## ") if part.startswith(f"The walk of {title}")]
    return {(a, b) for walk in walks for a, found, b in _ARROW.findall(walk) if found == sign}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    found: Pairs = set()
    for words in _RUNS:
        found |= calls_of(["train", *_SMALL.split(), *words.split()], tmp_path_factory.mktemp("walk"))
    return found


def is_upwards(caller: str, called: str) -> bool:
    """Whether the room of the called file is one that the caller's must not import."""
    room, other = (room_of(name_of(ROOT / "runner" / file)) for file in (caller, called))
    return other != room and other not in MAY_IMPORT[room]


def test_walks_name_files_and_have_arrows() -> None:
    pairs = arrows("→") | arrows("↑")
    assert len(pairs) >= 35
    assert [file for pair in pairs for file in pair if not (ROOT / "runner" / file).exists()] == []


def test_an_arrow_upwards_goes_to_a_room_that_is_not_imported() -> None:
    assert {pair: is_upwards(*pair) for pair in arrows("↑")} == dict.fromkeys(arrows("↑"), True)
    assert not any(is_upwards(*pair) for pair in arrows("→"))


@pytest.mark.costly
def test_each_arrow_is_a_call_of_a_run(calls: Pairs) -> None:
    assert (arrows("→") | arrows("↑")) - calls == set()


@pytest.mark.costly
def test_every_call_upwards_between_files_of_a_walk_is_told(calls: Pairs) -> None:
    files = {file for pair in arrows("→", "a micro-batch") for file in pair}
    assert {pair for pair in calls if {*pair} <= files and is_upwards(*pair)} == arrows("↑")
