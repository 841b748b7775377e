"""Keeps the assertions of other packages that do work in them, where Python is told to leave assertions out.

``python -O`` and ``PYTHONOPTIMIZE`` drop whole ``assert`` statements. Hydra's parser moves on in what it reads inside
of them, and DeepSpeed waits for its reads and writes of files inside of them: without them, ranges of a sweep cannot
be read, and states would be used before they have arrived.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

__all__ = ["keep_assertions"]

_WORKING = ("hydra.core.override_parser.overrides_visitor", "deepspeed.runtime.swap_tensor.", "deepspeed.io.")


def keep_assertions() -> None:
    """Compile such modules with their assertions from now on; call it before they are imported."""
    if sys.flags.optimize and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_WORKING):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _WithAssertions(spec.loader.name, spec.loader.path)
        return spec


class _WithAssertions(SourceFileLoader):
    """Compiles a module anew: what is stored beside it was compiled without assertions."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self.get_data(self.path), self.path, "exec", dont_inherit=True, optimize=0)
        return code
