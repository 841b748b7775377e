"""Requests that nobody would write, drawn from the schema: told in lines, in time, without a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from answers import answered_within
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from runner.cli.main import main
from runner.config.compose.groups import config_roots, groups, options
from runner.config.compose.shape import key_paths, type_at

BASE = ("model=mlp", "data.batch_size=8", "logger=none")
SECONDS = 30  # of the machine's worst day; a request is answered in one
STATUSES = (0, 2, 3)  # right after all, wrong, does not fit
KEYS = sorted(path for path in key_paths() if "kwargs" not in path)
GROUPS = sorted(groups())
LINE = re.compile(r"^\S.*: \S.*\.$")

_numbers = st.one_of(
    st.integers(-(10**30), 10**30),
    st.sampled_from([0, -1, 1, 2, 3, 7, 99, 2**31, 2**63, 10**9]),
    st.floats(allow_nan=True, allow_infinity=True).map(lambda value: repr(value).replace("inf", ".inf")),
)
_texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "null", "true", "???", "${oc.env:HOME}", "${seed}", "[", "{a: 1}", "[1,2]", "1e999", "é", "\n"]
    ),
    st.sampled_from(["a,b", "range(3)", "choice(1,2)", "'", '"', "~", "+", "=", "/", "../..", "nan", "0x10", "1_000"]),
)
_values = st.one_of(_numbers.map(str), _texts)


def _quoted(value: str) -> str:
    return json.dumps(value)


_settings = st.builds(
    lambda sign, key, value, quoted: f"{sign}{key}={_quoted(value) if quoted else value}",
    st.sampled_from(["", "", "", "+", "++", "~"]),
    st.one_of(st.sampled_from(KEYS), st.sampled_from(KEYS).map(lambda key: key[:-1]), st.text(max_size=8)),
    _values,
    st.booleans(),
)
_choices = st.builds(
    lambda group, option: f"{group}={option}",
    st.sampled_from(GROUPS),
    st.one_of(
        st.sampled_from(sorted({name for group in GROUPS for name in options(group, config_roots(Path.cwd()))})), _texts
    ),
)
_of_type = {
    "int": st.sampled_from(["-1", "0", "1", "2", "3", "7", "1000", "1000000", "1000000000", "-1000000000000"]),
    "float": st.sampled_from(["-1", "0", "0.5", "1", "1e-300", "1e300", ".inf", "-.inf", ".nan"]),
    "bool": st.sampled_from(["true", "false"]),
    "str": st.sampled_from(
        ["none", "auto", "x:y", "os:getcwd", "json:loads", "cuda", "cpu", "slurm", "zb_v", "0", "/", "''"]
    ),
    "list": st.sampled_from(["[]", "[0]", "[1]", "[3,2]", "[-1]", "[a]", "[[1]]", "[1,2,3,4,5,6,7,8,9]"]),
}


def _typed(key: str) -> st.SearchStrategy[str]:
    """A value that the key's type allows, as far as the machine may be from it."""
    annotation = str(type_at(key))
    found = [values for name, values in _of_type.items() if name in annotation] or list(_of_type.values())
    return st.one_of(found).map(lambda value: f"{key}={value}")


_right_types = st.lists(st.sampled_from(KEYS).flatmap(_typed), min_size=1, max_size=3)
_wild = st.lists(st.one_of(_settings, _choices, st.text(max_size=10)), min_size=1, max_size=4)
_words = st.one_of(_right_types, _right_types, _wild)


def _check(words: list[str], capsys: Any, place: Path) -> None:
    with answered_within(SECONDS, words):
        status = main(["plan", *BASE, *words])
    shown = capsys.readouterr()
    assert status in STATUSES, (words, shown.err)
    assert "Traceback" not in shown.err + shown.out, words
    if status == 2:
        lines = shown.err.splitlines()
        assert lines, words
        assert all(LINE.match(line) for line in lines), (words, shown.err)
    assert [path.name for path in place.iterdir() if path.name != "cache"] == [], words


def _examples(count: int) -> settings:
    """The same ones each time."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.full
@pytest.mark.timeout(3000)
@_examples(200)
@given(words=_words)
def test_two_hundred(words: list[str], capsys: pytest.CaptureFixture[str], place: Path) -> None:
    _check(words, capsys, place)
