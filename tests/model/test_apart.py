"""A function in a child process: its value, its errors, what it tells, and a crash of it."""

from __future__ import annotations

import copy
import ctypes
import logging
import multiprocessing
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from runner.errors import Problem, RequestError
from runner.model.apart import ApartError, EndedError, _try_backward, apart
from runner.model.fake import fake_tensors

ROOT = Path(__file__).parents[2] / "runner"


def test_the_value_comes_back_and_nothing_else_changes() -> None:
    kept: list[int] = []

    def append(number: int) -> tuple[int, list[int], int]:
        kept.append(number)
        return os.getpid(), kept, torch.get_num_threads()

    pid, seen, threads = apart(append, 3)
    assert pid != os.getpid()
    assert (seen, kept, threads) == ([3], [], 1)
    assert apart(lambda: apart(os.getpid) == os.getpid()), "within a child a function is simply called"


def test_problems_come_back_whatever_their_values() -> None:
    def refuse() -> None:
        raise RequestError([Problem("data", 4, "must be five", "so", "data=5"), Problem("loss", lambda: 0, "is odd")])

    with pytest.raises(RequestError) as caught:
        apart(refuse)
    first, second = caught.value.problems
    assert first == Problem("data", 4, "must be five", "so", "data=5")
    assert second.line().startswith("loss = <function")
    assert "in refuse" in str(caught.value.__cause__), "the traceback of the child"


class OfItsOwnKindError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize("error", [OfItsOwnKindError(1, 2), ValueError("1 and 2"), SystemExit("1 and 2")])
def test_another_error_comes_back_as_its_text(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(ApartError, match="1 and 2"):
        apart(fail)
    with pytest.raises(ApartError):
        apart(lambda: lambda: 0)  # a value that cannot be sent


def _read_nothing() -> None:
    ctypes.string_at(0)


@pytest.mark.parametrize(
    ("end", "said"), [(_read_nothing, "SIGSEGV"), (os.abort, "SIGABRT"), (lambda: os._exit(7), "status 7")]
)
def test_a_child_that_ends_early_is_told(end: Any, said: str) -> None:
    with pytest.raises(EndedError, match=said):
        apart(end)


@pytest.fixture(params=["fork", "spawn"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the child is made: a new process is for one whose autograd has threads, in whose forks no backward runs."""
    if request.param == "spawn":
        monkeypatch.setattr("runner.model.apart._try_backward", _refuse_in_fork)
    return str(request.param)


def _refuse_in_fork() -> None:
    raise RuntimeError("a new process does not know this one's changes")


class _Levels(NamedTuple):
    own: int
    other: int


def _tell() -> tuple[bool, _Levels]:
    logging.getLogger("runner.tests").info("%s of %d", "one", 2)
    logging.getLogger("runner.tests").debug("not this")
    logging.getLogger("runner.others").info("nor this")
    warnings.warn("beware", FutureWarning, stacklevel=1)
    warnings.warn("nor of this", DeprecationWarning, stacklevel=1)
    _try_backward()
    return multiprocessing.parent_process() is not None, _Levels(
        logging.getLogger("runner.tests").level, logging.getLogger("runner.others").level
    )


def test_records_and_warnings_are_those_of_this_process(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="runner.others")
    caplog.set_level("INFO", logger="runner.tests")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "nor of this")
        assert apart(_tell) == (True, (logging.INFO, logging.ERROR))
    assert [(str(each.message), each.filename, each.category) for each in told] == [("beware", __file__, FutureWarning)]
    assert [record.getMessage() for record in caplog.records] == ["one of 2"]


def _refuse(number: int) -> None:
    raise RequestError([Problem("data", number, "must be five", "so", "data=5")])


def test_a_problem_comes_back_from_either_kind_of_child(kind: str) -> None:
    with pytest.raises(RequestError) as caught:
        apart(_refuse, number=4)
    assert caught.value.problems == (Problem("data", 4, "must be five", "so", "data=5"),)


_AFTER_FAKE_TENSORS = """
import os
import torch
from runner.model.fake import fake_tensors

with fake_tensors():
    torch.ones(2)
torch.ones(2, requires_grad=True).sum().backward()
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
torch.ones(2, requires_grad=True).sum().backward()
"""


@pytest.mark.costly
@pytest.mark.skipif(torch.cuda.is_available(), reason="a backward starts the threads of a GPU")
def test_a_backward_after_fake_tensors_leaves_forks_theirs() -> None:
    """torch that is built for CUDA makes devices up for fake tensors, and its autograd would start their threads."""
    ended = subprocess.run([sys.executable, "-c", _AFTER_FAKE_TENSORS], capture_output=True, text=True, timeout=1500)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_output_is_written_once(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    sys.stdout.write("before, ")
    apart(print, "within")
    assert capfd.readouterr().out == "before, within\n"


def test_a_gradient_is_computed_in_the_child_after_one_here() -> None:
    def gradient() -> float:
        value = torch.ones(300, 300, requires_grad=True)
        (value @ value).sum().backward()  # type: ignore[no-untyped-call]
        assert value.grad is not None
        return float(value.grad[0, 0])

    assert apart(gradient) == gradient() == apart(gradient)


def test_fake_tensors_are_made_in_one_place() -> None:
    """Elsewhere a user's code could meet them in the process of a command, and crash it."""
    files = [file for file in ROOT.rglob("*.py") if "FakeTensorMode(" in file.read_text(encoding="utf-8")]
    assert files == [ROOT / "model" / "fake.py"]


def test_a_copy_of_a_fake_module_is_like_that_of_a_real_one() -> None:
    def of(module: nn.Module) -> list[Any]:
        tied = nn.ModuleList([module, module, nn.Linear(2, 2).requires_grad_(False)])
        made = copy.deepcopy(tied)
        assert made[0] is made[1] is not module
        kinds = [(name, p.shape, p.dtype, p.requires_grad) for name, p in made.named_parameters()]
        return [kinds, [(name, b.shape, b.dtype) for name, b in made.named_buffers()]]

    def faked() -> list[Any]:
        with fake_tensors():
            return of(nn.BatchNorm1d(2))

    assert apart(faked) == of(nn.BatchNorm1d(2))
