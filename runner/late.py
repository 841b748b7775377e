"""Imports packages when they are first used, where others import them early and most runs never use them.

Lightning imports torch's compiler for one class, and torchmetrics for two; torchmetrics imports SciPy's signals,
Matplotlib and Transformers for metrics that few runs have. Together they are more than half of a rank's start. A
backward imports a library of algebra to compare two sizes that are numbers. After
:func:`import_late`, such a package is an empty module at first. It answers for the few names that Lightning and torch's
optimizers ask of it, and becomes the whole package as soon as anything else is asked, by whomever.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["import_late"]


@dataclass(frozen=True, slots=True)
class _LatePackage:
    """A package that is imported late.

    Args:
        early: makes each name that does not need the whole package.
        parts: its modules that can be imported without the whole package; their own modules can, too. The first one is
            imported before the others.
    """

    name: str
    early: Mapping[str, Callable[[], Any]]
    parts: tuple[str, ...] = ()
    lock: threading.RLock = field(default_factory=threading.RLock)

    def prepare(self, module: str) -> None:
        """Import what must be imported before a module of this package: the package, or the first of its parts."""
        part = module.removeprefix(f"{self.name}.").partition(".")[0]
        if part not in self.parts:
            _complete(sys.modules.get(self.name))
        elif part != self.parts[0] and isinstance(sys.modules.get(self.name), _Late):
            importlib.import_module(f"{self.name}.{self.parts[0]}")


class _Late(ModuleType):
    """The module of a package that nobody has needed yet. It changes its class when it becomes the package."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        package: _LatePackage = self.__dict__["__late__"]
        if name in package.early:
            return package.early[name]()
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)  # what Python asks of every module
        _complete(self)
        return getattr(self, name)


class _LateLoader(Loader):
    """Makes the empty module of a late package."""

    def __init__(self, package: _LatePackage, whole: Loader) -> None:
        self._package, self._whole = package, whole

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Late(spec.name)
        module.__dict__.update(__late__=self._package, __whole__=self._whole)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


class _LateFinder(MetaPathFinder):
    """Finds late packages, and completes one before a module of it is imported that needs the whole package."""

    def __init__(self, packages: Sequence[_LatePackage]) -> None:
        self._packages = {package.name: package for package in packages}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._packages:
            return self._late_spec(self._packages[fullname], path)
        for package in self._packages.values():
            if fullname.startswith(f"{package.name}."):
                package.prepare(fullname)
        return None

    def _late_spec(self, package: _LatePackage, path: Sequence[str] | None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(package.name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _LateLoader(package, spec.loader)
        return spec


def import_late() -> None:
    """Import torch's compiler and symbols, torchmetrics and its plots late in this process, if they are not there yet.

    Nothing is imported here. Call it before Lightning is imported, in processes that belong to the runner.
    """
    if not any(isinstance(finder, _LateFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LateFinder([_COMPILER, _SHAPES, _METRICS, _PLOTS]))


def _complete(module: ModuleType | None) -> None:
    """Make the whole package of a late module, which stays the same object. Other modules are left as they are."""
    if not isinstance(module, _Late):
        return
    package: _LatePackage = module.__dict__["__late__"]
    with package.lock:
        if "__late__" not in module.__dict__:  # another thread was first
            return
        whole: Loader = module.__dict__["__whole__"]
        module.__class__ = ModuleType  # type: ignore[assignment]  # while it is made, it answers as any package
        try:
            whole.exec_module(module)
        except BaseException:
            module.__class__ = _Late
            raise
        for name in ("__late__", "__whole__"):
            del module.__dict__[name]
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = whole


def _is_whole(name: str) -> bool:
    return name in sys.modules and not isinstance(sys.modules[name], _Late)


class _StandsForCompiled(type):
    """Says which objects are compiled modules: none, until somebody has imported the compiler."""

    def __instancecheck__(cls, instance: object) -> bool:
        return _is_whole("torch._dynamo") and isinstance(instance, sys.modules["torch._dynamo"].OptimizedModule)


class _CompiledModule(metaclass=_StandsForCompiled):
    """What Lightning gets as ``torch._dynamo.OptimizedModule``; it only asks what is an instance."""


class _StandsForAxes(type):
    """Says which objects are Matplotlib's axes."""

    def __instancecheck__(cls, instance: object) -> bool:
        return "matplotlib.axes" in sys.modules and isinstance(instance, sys.modules["matplotlib.axes"].Axes)


class _Axes(metaclass=_StandsForAxes):
    """What torchmetrics gets as the class of Matplotlib's axes."""


def _hide_from_compiler(function: Callable[..., Any], recursive: bool = True, **options: Any) -> Callable[..., Any]:
    """Like ``torch._dynamo.disable``: while nobody has imported the compiler, there is nothing to hide from."""
    real: Callable[..., Any] | None = None

    @functools.wraps(function)
    def hidden(*args: Any, **kwargs: Any) -> Any:
        nonlocal real
        if real is None:
            if not _is_whole("torch._dynamo"):
                return function(*args, **kwargs)
            real = sys.modules["torch._dynamo"].disable(function, recursive, **options)
        return real(*args, **kwargs)

    return hidden


def _sizes_equal(one: Any, other: Any) -> Any:
    """Like ``symbolic_shapes.sym_eq``, without symbols for sizes that are numbers."""
    if all(type(each) is int for sizes in (one, other) if isinstance(sizes, tuple) for each in sizes):
        return one == other
    return _whole_shapes().sym_eq(one, other)


def _expect_true(condition: Any) -> Any:
    """Like ``symbolic_shapes.expect_true``, without symbols for a condition that is known."""
    return condition if isinstance(condition, bool) else _whole_shapes().expect_true(condition)


def _whole_shapes() -> Any:
    shapes = importlib.import_module(_SHAPES.name)
    _complete(shapes)
    return shapes


def _plot(*args: Any, **kwargs: Any) -> Any:
    """Like torchmetrics' function of this name, which needs Matplotlib."""
    plots = importlib.import_module("torchmetrics.utilities.plot")
    _complete(plots)
    return plots.plot_single_or_multi_val(*args, **kwargs)


def _attribute(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(module), name)


def _value(value: object) -> Callable[[], Any]:
    return lambda: value


_COMPILER = _LatePackage(
    "torch._dynamo",
    early={
        "OptimizedModule": _value(_CompiledModule),
        "disable": _value(_hide_from_compiler),  # wraps functions of torch's optimizers
        "graph_break": _value(lambda: None),  # means something to a compiler alone
        "trace_rules": _value(SimpleNamespace(clear_lru_cache=lambda: None)),  # the first process group clears it
    },
    parts=("config",),  # each mode of fake tensors reads it
)
_SHAPES = _LatePackage(
    "torch.fx.experimental.symbolic_shapes",
    early={"sym_eq": _value(_sizes_equal), "expect_true": _value(_expect_true)},  # each backward compares sizes
)
_METRICS = _LatePackage(
    "torchmetrics",
    early={
        "Metric": _attribute("torchmetrics.metric", "Metric"),
        "MetricCollection": _attribute("torchmetrics.collections", "MetricCollection"),
        "__version__": _attribute("torchmetrics.__about__", "__version__"),
        "_logger": _value(logging.getLogger("torchmetrics")),
    },
    parts=("utilities", "metric", "collections", "__about__"),
)
_PLOTS = _LatePackage(
    "torchmetrics.utilities.plot",
    early={"_AX_TYPE": _value(_Axes), "_PLOT_OUT_TYPE": _value(object), "plot_single_or_multi_val": _value(_plot)},
)
