"""A part of the corpus, another one at each commit; all of it is ``python -m tests.corpus``, or ``-m full``."""

from __future__ import annotations

import random
from typing import Any

import corpus_digests
import pytest
from corpus_digests import changes, entries, processor, version
from requests_of_commit import commit

_QUICK = {"plan": 10, "run": 4, "wrong": 20}


@pytest.mark.parametrize("kind", _QUICK)
def test_some_requests_give_what_is_kept(kind: str) -> None:
    kept = sorted(name for name in entries() if name.startswith(kind))
    assert list(changes(random.Random(commit()).sample(kept, min(_QUICK[kind], len(kept))))) == []


def _told(monkeypatch: pytest.MonkeyPatch, before: dict[str, Any], now: dict[str, Any], *, here: bool = True) -> str:
    part = {"processor": processor() if here else "another", "entries": {"plan 0": {"words": "w", **before}}}
    monkeypatch.setattr(corpus_digests, "kept", lambda: {f"{version()} and 9.9": part})
    monkeypatch.setattr(corpus_digests, "entry", lambda name: {"words": "w", **now})
    return "".join(changes(["plan 0"]))


def test_each_key_that_is_another_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"plan": {"time": "a", "stages": "b"}, "peaks": [1, 2], "weights": "c", "loss": [1.0]}
    assert _told(monkeypatch, before, before) == ""
    assert "plan: other time" in _told(monkeypatch, before, before | {"plan": {"time": "d", "stages": "b"}})
    assert "peaks: [1, 2] -> [1, 3]" in _told(monkeypatch, before, before | {"peaks": [1, 3]})
    assert "weights: c -> d" in _told(monkeypatch, before, before | {"weights": "d"})
    assert "peaks: [1, 2] -> None" in _told(monkeypatch, before, {"refused": ["e"]})


def test_weights_of_another_processor_are_compared_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    before, near = {"weights": "c", "norm": 2.0, "loss": [1.0]}, {"weights": "d", "norm": 2.0 + 1e-5, "loss": [1.0]}
    assert _told(monkeypatch, before, near, here=False) == ""
    assert "norm: 2.0 -> 2.1" in _told(monkeypatch, before, near | {"norm": 2.1}, here=False)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["plan", "run", "wrong"])
def test_all_requests_give_what_is_kept(kind: str) -> None:
    assert list(changes(name for name in entries() if name.startswith(kind))) == []
