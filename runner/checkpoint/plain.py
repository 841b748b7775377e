"""Makes what a run saves plain, so that files stay free of pickled objects; and makes it again what it was.

A run's state (of callbacks, optimizers, schedulers, and what a module adds in ``on_save_checkpoint``) is given back as
it was, or it is named as lost. Hyperparameters, which no run reads again, are kept wherever they can be told in plain
values: a dataclass as a dictionary, a ``functools.partial`` in Hydra's notation, a class by its name.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.checkpoint.durable import CheckpointError
from runner.checkpoint.kinds import KINDS, kind_of
from runner.config.rules.sections import may_be_called

__all__ = ["MISSING", "Lost", "Plain", "as_plain", "given_back"]

MISSING = "runner_missing"
"""Key of what could not be saved: why, by place."""
_KINDS = "runner_kinds"
"""Key of the kinds of values that were made plain, by place."""
_TOLD = ("hyper_parameters", "datamodule_hyper_parameters")  # Lightning's keys for hyperparameters
_CLASS_OF_TOLD = ("hparams_type", "datamodule_hparams_type")  # a class; its values know their kind themselves
_WEIGHTS = ("state_dict", "replica_buffers", "older_weight_versions")
_BY_OWNER = ("callbacks", "optimizer_states", "lr_schedulers")  # a dictionary or list with one entry for each owner
_SCALARS = (bool, int, float, str, type(None))
_LONGEST_TEXT = 200


@dataclass(frozen=True)
class Lost:
    """A part of a run's state that no file can hold.

    Args:
        place: keys joined by slashes, ``callbacks/Mine/best``.
        why: a sentence without a full stop.
        names: what ``checkpoint.allow_pickle`` could name to have it saved; empty if nothing helps.
    """

    place: str
    why: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plain:
    """The content of a checkpoint made of tensors and plain values.

    Args:
        content: what can be saved; it names what is missing.
        lost: parts of the state that are left out.
        told: hyperparameters that are kept in other words, by place: what they were.
    """

    content: dict[str, Any]
    lost: tuple[Lost, ...]
    told: Mapping[str, str]


def as_plain(content: Mapping[str, Any], *, in_parts: bool = False) -> Plain:
    """``content`` made of tensors and plain values, and of what ``checkpoint.allow_pickle`` names in a whole file.

    Args:
        content: a checkpoint's content.
        in_parts: whether it becomes a part, which holds nothing but tensors and JSON.
    """
    made: dict[str, Any] = {}
    lost: list[Lost] = []
    words = _Words(in_parts=in_parts, admitted=frozenset() if in_parts else _admitted())
    for key, value in content.items():
        if key in _WEIGHTS or key in _CLASS_OF_TOLD:
            made |= {key: value} if key in _WEIGHTS else {}
        elif key in _BY_OWNER and isinstance(value, dict | list):
            made[key] = type(value)()
            for name, one in value.items() if isinstance(value, dict) else enumerate(value):
                found = _whole_or_lost(words, (key, name), one, lost)
                if isinstance(value, list):
                    made[key].append({} if found is _NOTHING else found)
                elif found is not _NOTHING:
                    made[key][name] = found
        else:
            found = _whole_or_lost(words, (key,), value, lost)
            made |= {} if found is _NOTHING else {key: found}
    if lost:
        made[MISSING] = {**made.get(MISSING, {}), **{one.place: one.why for one in lost}}
    if words.kinds:
        made[_KINDS] = words.kinds
    return Plain(made, tuple(lost), words.told)


_NOTHING: Any = object()


def _whole_or_lost(words: _Words, path: tuple[Any, ...], value: Any, lost: list[Lost]) -> Any:
    """``value`` made plain; nothing if a part of it is lost, because half a state is none."""
    before = dict(words.kinds)
    try:
        return words.of(value, path)
    except _CannotBeSaved as error:
        words.kinds.clear()
        words.kinds.update(before)
        lost.append(error.lost)
        return _NOTHING


def given_back(content: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`as_plain` for all kinds of :data:`runner.checkpoint.kinds.KINDS`.

    Raises:
        CheckpointError: the file's list of kinds is wrong.
    """
    kinds = content.get(_KINDS)
    if kinds is None:
        return content
    try:
        named = {tuple(json.loads(place)): KINDS[name] for place, name in kinds.items()}
        tops = {path[0] for path in named}
        back = {key: _back(value, (key,), named) if key in tops else value for key, value in content.items()}
    except Exception as error:  # the file may say anything
        raise CheckpointError(f"its list of kinds of values is wrong: {error}") from error
    del back[_KINDS]
    return back


def _back(value: Any, path: tuple[Any, ...], named: Mapping[tuple[Any, ...], Any]) -> Any:
    if type(value) is dict:
        value = {key: _back(one, (*path, key), named) for key, one in value.items()}
    elif type(value) in (list, tuple):
        value = type(value)(_back(one, (*path, at), named) for at, one in enumerate(value))
    return named[path].back(value) if path in named else value


class _CannotBeSaved(Exception):
    def __init__(self, lost: Lost) -> None:
        super().__init__(lost.why)
        self.lost = lost


@dataclass
class _Words:
    """Makes values plain, and notes which kinds they were.

    Args:
        in_parts: see :func:`as_plain`.
        admitted: identities of the classes and functions that a file may name.
        kinds: the kind that brings a value back, for each place as JSON.
        told: see :class:`Plain`.
    """

    in_parts: bool
    admitted: frozenset[int]
    kinds: dict[str, str] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)

    def of(self, value: Any, path: tuple[Any, ...]) -> Any:
        """``value`` in plain values.

        Raises:
            _CannotBeSaved: it is part of a state, and cannot be brought back.
        """
        if type(value) in _SCALARS or isinstance(value, Tensor):
            return value
        if id(value) in self._open:
            return self._other(value, path, "contains itself")
        self._open.add(id(value))
        try:
            return self._of_parts(value, path)
        finally:
            self._open.discard(id(value))

    def _of_parts(self, value: Any, path: tuple[Any, ...]) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self.of(one, (*path, at)) for at, one in enumerate(value))
        if type(value) is dict:
            return {self._key(key, path): self.of(one, (*path, self._key(key, path))) for key, one in value.items()}
        name = kind_of(value)
        if name is not None:
            kind = KINDS[name]
            parts = kind.plain(value)
            if kind.is_native and not self.in_parts and _is_flat(parts):
                return value
            if parts is not None:
                made = self.of(parts, path)
                self.kinds[json.dumps(path)] = name
                return made
        if (id(type(value)) in self.admitted or id(value) in self.admitted) and _comes_back(value):
            return value
        return self._other(value, path)

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if type(key) in _SCALARS:
            return key
        if path[0] in _TOLD:
            return key.name if isinstance(key, enum.Enum) else str(key)
        raise _CannotBeSaved(Lost(_named(path), f"it has {type(key).__name__} objects as keys"))

    def _other(self, value: Any, path: tuple[Any, ...], what: str = "") -> Any:
        """A value of no kind: told in plain values if it is a hyperparameter."""
        said = what or f"is a {_name_of(value if isinstance(value, type) else type(value))}"
        if path[0] in _TOLD:
            self.told[_named(path)] = said
            return _short(value) if what else self.of(_in_plain_words(value), path)
        why = f"{_named(path)} {said}, which no file can hold"
        raise _CannotBeSaved(Lost(_named(path), why, () if what or self.in_parts else _names_in(value)))


def _named(path: tuple[Any, ...]) -> str:
    return "/".join(str(one) for one in path)


def _is_flat(parts: Any) -> bool:
    if isinstance(parts, dict):
        parts = [*parts, *parts.values()]
    return all(type(one) in _SCALARS for one in parts) if isinstance(parts, list) else type(parts) in _SCALARS


def _in_plain_words(value: Any) -> Any:
    """A hyperparameter told in simpler values."""
    if isinstance(value, enum.Enum):
        return value.value if type(value.value) in _SCALARS else value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
    if isinstance(value, functools.partial):
        arguments = {"_args_": list(value.args)} if value.args else {}
        return {"_target_": _name_of(value.func), "_partial_": True, **arguments, **value.keywords}
    if isinstance(value, type) or inspect.isroutine(value):
        return _name_of(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    bases: tuple[Any, ...] = (dict, list, tuple, int, float, str)
    simple = next((base for base in bases if isinstance(value, base)), None)
    return simple(value) if simple is not None else _short(value)


def _short(value: Any) -> str:
    """A text of one line that tells a value; without an address, which would be another one in each run."""
    try:
        said = repr(value)
    except Exception:
        said = ""
    if not said or "\n" in said or " at 0x" in said or len(said) > _LONGEST_TEXT:
        return f"<{_name_of(type(value))}>"
    return said


def _name_of(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    module = getattr(value, "__module__", None) or type(value).__module__
    return name if module == "builtins" else f"{module}.{name}"


def _admitted() -> frozenset[int]:
    """The identities of what files may name now, see :func:`runner.checkpoint.file.admitted`."""
    found = torch.serialization.get_safe_globals()
    return frozenset(id(one[0] if isinstance(one, tuple) else one) for one in found)


def _comes_back(value: Any) -> bool:
    """Whether the file of a value is read again as it is written."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # code of a user's class runs in it
        return False
    return True


def _names_in(value: Any) -> tuple[str, ...]:
    """What would have to be allowed for a value to be saved; empty if that may not be, or would not do."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        found = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:
        return ()
    names = tuple(_with_colon(found))
    return names if names and all(may_be_called(name) for name in names) else ()


def _with_colon(names: list[str]) -> Iterator[str]:
    for name in names:
        module, _, own = name.rpartition(".")
        yield f"{module}:{own}"
