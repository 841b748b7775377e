"""Slices of the tests marked ``full``: together they are all of them, and each test is in one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import full_slices
import pytest
import skips
import slow_tests
from full_slices import SLICES, SLOW_SLICES, Slice, read_slice, slice_of_commit

pytest_plugins = "pytester"

TESTS = """
import pytest

def test_quick():
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.full
@pytest.mark.parametrize("case", range(12))
def test_whole(case):
    pass
"""
WHOLE = {f"test_small.py::test_whole[{case}]" for case in range(12)}
OTHERS = {"test_small.py::test_quick", "test_small.py::test_slow"}


@pytest.fixture
def small(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of fourteen tests under this project's choice and defaults."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini("[pytest]\naddopts = -m 'not full'\nmarkers =\n    slow\n    full")
    shutil.copy(Path(__file__).parents[1] / "conftest.py", pytester.path)
    for file in (full_slices.__file__, skips.__file__, slow_tests.__file__, slow_tests.LIST):
        shutil.copy(str(file), pytester.path)
    pytester.makepyfile(test_small=TESTS)
    return pytester


def chosen(small: pytest.Pytester, *options: str) -> set[str]:
    """The node ids that a command runs."""
    done = small.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider", *options)
    return {line for line in done.outlines if "::" in line}


def test_every_full_test_is_in_exactly_one_slice(small: pytest.Pytester) -> None:
    slices = [chosen(small, "--full-slice", f"{number}/3") for number in range(3)]
    assert all(one >= OTHERS for one in slices)
    found = [node_id for one in slices for node_id in one - OTHERS]
    assert len(found) == len(WHOLE)
    assert set(found) == WHOLE
    assert all(one > OTHERS for one in slices), "twelve tests are spread over three slices"


def test_every_slow_test_is_in_exactly_one_slice(small: pytest.Pytester) -> None:
    quick, slow = sorted(OTHERS)
    small.makepyfile(
        test_small=TESTS.replace("def test_slow():", '@pytest.mark.parametrize("n", range(9))\ndef test_slow(n):')
    )
    slices = [chosen(small, "--slow-slice", f"{number}/3") for number in range(3)]
    assert all(quick in one and len(one) > 1 for one in slices), "nine tests are spread over three slices"
    assert sorted(each for one in slices for each in one - {quick}) == [f"{slow}[{n}]" for n in range(9)]
    both = chosen(small, "--slow-slice", "0/3", "--full-slice", "1/3")
    assert both & WHOLE == chosen(small, "-m", "full", "--full-slice", "1/3")
    assert both - WHOLE == slices[0]


def test_without_the_option_markers_choose(small: pytest.Pytester) -> None:
    assert chosen(small) == OTHERS
    assert chosen(small, "-m", "full") == WHOLE
    assert chosen(small, "-m", "not slow") == {"test_small.py::test_quick"}
    assert chosen(small, "-m", "not slow", "--full-slice", "0/1") == {"test_small.py::test_quick"}
    assert chosen(small, "-m", "full", "--full-slice", "0/1") == WHOLE


def test_the_commit_chooses(small: pytest.Pytester) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *words], cwd=small.path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message=one")
    chosen_slice = slice_of_commit(git("rev-parse", "HEAD"))
    assert chosen(small, "--full-slice", "commit") == chosen(small, "--full-slice", str(chosen_slice))
    third = slice_of_commit(git("rev-parse", "HEAD"), SLOW_SLICES)
    assert chosen(small, "--slow-slice", "commit") == chosen(small, "--slow-slice", str(third))


def test_all_slices_come_in_turn() -> None:
    assert [slice_of_commit(f"{number:040x}").number for number in range(SLICES)] == list(range(SLICES))
    assert slice_of_commit("03b4cbc") == Slice(0x03B4CBC % SLICES, SLICES)


def test_a_hash_is_the_same_on_every_machine() -> None:
    assert [case for case in range(12) if Slice(0, 3).has(f"test_small.py::test_whole[{case}]")] == [0, 3, 7, 11]


@pytest.mark.parametrize("text", ["3", "3/3", "-1/3", "1/0", "head", ""])
def test_what_is_no_slice_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be commit or N/COUNT with N < COUNT"):
        read_slice(text, tmp_path)


def test_where_there_is_no_commit_there_is_no_slice_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match="commit: .*not a git repository"):
        read_slice("commit", tmp_path)


SKIPPED = """
import pytest

def test_skipped():
    pytest.skip({reason!r})

@pytest.mark.skipif(True, reason={reason!r})
def test_left_out():
    pass
"""


@pytest.mark.parametrize(("reason", "failed"), [("no mpirun", 1), ("no file system can be mounted here", 0)])
def test_what_could_be_installed_is_no_reason_to_skip(
    small: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, reason: str, failed: int
) -> None:
    small.makepyfile(test_small=SKIPPED.format(reason=reason))
    for ci, status in (("", 0), ("true", failed)):
        monkeypatch.setenv("CI", ci)
        done = small.runpytest_inprocess("-p", "no:cacheprovider")
        assert done.ret == status
        assert f"skipped, 2: {reason}" in done.outlines
        assert (f"not to be skipped where CI=true: {reason}" in done.outlines) is bool(status)


@pytest.mark.full
def test_workers_tell_what_they_skipped(small: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    small.makepyfile(test_small=SKIPPED.format(reason="no mpirun"))
    done = small.runpytest_subprocess("-p", "no:cacheprovider", "-n", "1")
    assert done.ret == 1
    assert "not to be skipped where CI=true: no mpirun" in done.outlines
