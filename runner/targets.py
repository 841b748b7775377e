"""Import what a configuration names, ``package.module:name``, where nothing needs torch for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.errors import Problem, RequestError, did_you_mean

__all__ = ["import_target"]


def import_target(path: str, target: str) -> Callable[..., Any]:
    """The object that ``target`` names.

    The working directory is importable, so that a user's own modules need no installation.

    Args:
        path: the field that holds the target, for messages, e.g. ``model.target``.
        target: ``package.module:function``.

    Raises:
        RequestError: the module does not import, or has no such name; the cause is in the message.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise RequestError([Problem(path, target, "must be package.module:function")])
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        why = f"Importing {module_name} raised {type(error).__name__}: {error}"
        raise RequestError([Problem(path, target, "must name a module that imports", why)]) from error
    found = getattr(module, name, None)
    if not callable(found):
        near = did_you_mean(name, (key for key, value in vars(module).items() if callable(value)))
        fix = f"{path}={module_name}:{near}" if near else ""
        why = f"{module_name} has no function {name}"
        raise RequestError([Problem(path, target, "must name a function of that module", why, fix)])
    return found  # type: ignore[no-any-return]
