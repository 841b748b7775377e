"""Late packages: empty until something is asked that needs the whole package."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from runner import late


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package ``heavy`` of which ``light`` and ``other`` can be imported alone; ``weight`` needs the whole."""
    folder = tmp_path / "heavy"
    folder.mkdir()
    (folder / "__init__.py").write_text("from heavy.weight import WEIGHT\nEARLY = 'whole'\n__all__ = ['WEIGHT']\n")
    (folder / "weight.py").write_text("WEIGHT = 1000\n")
    (folder / "light.py").write_text("import sys\nBEFORE = sorted(name for name in sys.modules if 'heavy' in name)\n")
    (folder / "other.py").write_text("from heavy.light import BEFORE\n")
    monkeypatch.syspath_prepend(tmp_path)
    described = late._LatePackage("heavy", early={"EARLY": lambda: "early"}, parts=("light", "other"))
    finder = late._LateFinder([described])
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield importlib.import_module("heavy")
    for name in [name for name in sys.modules if name.partition(".")[0] == "heavy"]:
        del sys.modules[name]


def is_whole(module: object) -> bool:
    return type(module) is ModuleType


def test_an_early_name_needs_nothing(package: Any) -> None:
    assert package.EARLY == "early"
    assert not hasattr(package, "__version__")
    assert package.__file__.endswith("__init__.py")
    assert not is_whole(package)
    assert "heavy.weight" not in sys.modules


def test_any_other_name_makes_the_package_whole(package: Any) -> None:
    assert package.WEIGHT == 1000
    assert is_whole(package)
    assert package is sys.modules["heavy"]
    assert package.EARLY == "whole"
    assert importlib.reload(package) is package


def test_a_name_that_it_lacks_is_no_attribute(package: Any) -> None:
    with pytest.raises(AttributeError, match="module 'heavy' has no attribute 'nothing'"):
        _ = package.nothing


def test_a_part_is_imported_alone_after_the_first_one(package: Any) -> None:
    importlib.import_module("heavy.other")
    assert not is_whole(package)
    assert sys.modules["heavy.light"].BEFORE == ["heavy", "heavy.light"]  # light came first, and alone


def test_another_module_of_it_makes_it_whole_before(package: Any) -> None:
    importlib.import_module("heavy.weight")
    assert is_whole(package)


def test_all_names_are_those_of_the_whole(package: Any) -> None:
    names: dict[str, object] = {}
    exec("from heavy import *", names)
    assert names["WEIGHT"] == 1000


def test_a_package_that_cannot_be_imported_says_so_each_time(package: Any) -> None:
    (Path(package.__file__).parent / "weight.py").write_text("raise OSError('not here')\n")
    for _ in range(2):
        with pytest.raises(OSError, match="not here"):
            _ = package.WEIGHT
    assert package.EARLY == "early"


def test_a_function_is_hidden_from_the_compiler_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made before the compiler was imported, and is called for every operator."""
    asked: list[object] = []

    def disable(function: Any, recursive: bool, **options: object) -> Any:
        asked.append((function, recursive, options))
        return lambda value: 10 * function(value)

    compiler: Any = ModuleType("torch._dynamo")
    compiler.disable = disable
    monkeypatch.delitem(sys.modules, compiler.__name__, raising=False)
    hidden = late._hide_from_compiler(abs, False, wrapping=False)
    before = hidden(-1)
    monkeypatch.setitem(sys.modules, compiler.__name__, compiler)

    assert [before, hidden(-2), hidden(-3)] == [1, 20, 30]
    assert asked == [(abs, False, {"wrapping": False})]


def test_a_backward_compares_sizes_without_symbols_until_there_are_any() -> None:
    one, other = torch.Size([2, 3]), torch.Size([2, 4])
    assert late._expect_true(late._sizes_equal(one, torch.Size([2, 3]))) is True
    assert late._expect_true(late._sizes_equal(one, other)) is False

    size = ShapeEnv().create_unbacked_symint()
    assert late._expect_true(late._sizes_equal((size, 3), (size, 3)))
    assert not late._expect_true(late._sizes_equal((size, 3), (size, 4)))


def test_a_command_that_runs_backwards_imports_no_algebra() -> None:
    code = """
import sys, torch
from runner.late import import_late
import_late()
weight = torch.ones(3, requires_grad=True)
torch.autograd.backward([weight * 2], [torch.ones(3)])
assert weight.grad.tolist() == [2, 2, 2] and "sympy" not in sys.modules
try:
    torch.autograd.backward([weight * 2], [torch.ones(4)])
except RuntimeError as error:
    assert "Mismatch in shape" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
