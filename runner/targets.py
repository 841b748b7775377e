"""Imports objects that a configuration names as ``package.module:name``; needs no torch."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.errors import Problem, RequestError, did_you_mean
from runner.reads import hearing

__all__ = ["call_named", "import_named", "import_target", "names_environment", "with_environment"]


def import_named(path: str, target: str, *, what: str = "function", fits: Callable[[Any], bool] = callable) -> Any:
    """Import and return the object that ``target`` names.

    Modules in the working directory can be imported, so that a user's own modules need no installation.

    Args:
        path: the field that holds the target, for messages, e.g. ``model.target``.
        target: ``package.module:name``, or ``package.module:Class.name`` for what a class has.
        what: the kind of object that is expected, for messages.
        fits: whether an object is of this kind.

    Raises:
        RequestError: the module cannot be imported, or has no such object; the message has the cause.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise RequestError([Problem(path, target, f"must be package.module:{what.split()[0]}")])
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        with hearing():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        why = f"Importing {module_name} raised {type(error).__name__}: {error}"
        meant = _meant_module(module_name, error)
        fix = f"{path}={meant}:{name}" if meant is not None else ""
        raise RequestError([Problem(path, target, "must name a module that imports", why, fix)]) from error
    found = _member(module, name)
    if not fits(found):
        near = did_you_mean(name, (key for key, value in vars(module).items() if fits(value)))
        fix = f"{path}={module_name}:{near}" if near else ""
        why = f"{module_name} has no {what} {name}"
        raise RequestError([Problem(path, target, f"must name a {what} of that module", why, fix)])
    return found


def _member(module: Any, name: str) -> Any:
    """What a module, or the class that the name begins with, has under a name; None if there is nothing."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _meant_module(name: str, error: BaseException) -> str | None:
    """The module of the working directory that was meant by ``name``, of which there is none."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    file = name.removesuffix(".py")
    if file != name and Path(f"{file}.py").is_file():
        return file
    is_missing = error.name == name  # and not a module that this one imports
    return did_you_mean(name, (path.stem for path in Path.cwd().glob("*.py"))) if is_missing else None


def call_named(path: str, target: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a user's function returns.

    Args:
        path: the field that names it, for messages.
        target: ``package.module:name``.
        function: what ``target`` names.
        args, kwargs: what it is called with; ``kwargs`` may name variables of the environment.

    Raises:
        RequestError: it raised; the error and the line of the user's code are in the message.
    """
    kwargs = with_environment(kwargs)
    try:
        return function(*args, **kwargs)
    except RequestError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is this one
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        why = f"Calling it raised {type(error).__name__}: {error}{where}"
        raise RequestError([Problem(path, target, "must run with the arguments that it is given", why)]) from error


def names_environment(value: object) -> bool:
    """Whether a text takes variables of the environment, as ``${oc.env:TOKEN}`` does."""
    return isinstance(value, str) and "oc.env:" in value and "${" in value


def with_environment(value: Any) -> Any:
    """Values of a request in which the variables of the environment that they name stand in their place.

    A request keeps ``${oc.env:TOKEN}`` as it is, so that no file of a run holds the token. Call this where a value is
    used, and write the result nowhere.

    Args:
        value: a dictionary, a list or a plain value.

    Raises:
        RequestError: a variable is not set.
    """
    if isinstance(value, dict):
        return {key: with_environment(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_environment(inner) for inner in value]
    return _from_environment(value) if names_environment(value) else value


def _from_environment(text: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create({"value": text}), resolve=True)["value"]  # type: ignore[index,call-overload]  # a dictionary went in
    except OmegaConfBaseException as error:
        rule = "must name variables of the environment that are set, and nothing else of the request"
        raise RequestError([Problem("kwargs", text, rule, str(error).splitlines()[0])]) from error


def import_target(path: str, target: str) -> Callable[..., Any]:
    """Import and return the function that ``target`` names; see :func:`import_named`."""
    found: Callable[..., Any] = import_named(path, target)
    return found
