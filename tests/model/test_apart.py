"""A function in a child process: its value, its errors, what it tells, and a crash of it."""

from __future__ import annotations

import copy
import ctypes
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.errors import Problem, RequestError
from runner.model.apart import ApartError, EndedError, apart
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


def test_records_and_warnings_are_those_of_this_process(caplog: pytest.LogCaptureFixture) -> None:
    def tell() -> None:
        logging.getLogger("runner.tests").warning("%s of %d", "one", 2)
        logging.getLogger("runner.tests").debug("not this")
        warnings.warn("beware", FutureWarning, stacklevel=1)

    with pytest.warns(FutureWarning, match="beware") as told:
        apart(tell)
    assert [(each.filename, each.category) for each in told] == [(__file__, FutureWarning)]
    assert [record.getMessage() for record in caplog.records] == ["one of 2"]


def test_output_is_written_once(capfd: pytest.CaptureFixture[str]) -> None:
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
