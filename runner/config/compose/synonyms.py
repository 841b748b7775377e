"""What other tools call our keys and options, so that their words are answered with ours.

The names stand beside what they mean, in lines ``# also: ...`` below a field of the schema, or at the end of an option
file. Entries are separated by commas:

========================= ============ ==================================================
entry                     stands at    means
========================= ============ ==================================================
``NAME``                  a key        another name of the key, with the same value
``NAME=VALUE -> OURS``    a key        this override is the key with our value
``NAME``                  a group      another name of the group
``NAME``                  an option    another name of the option
``NAME=VALUE``            an option    this override chooses the option
========================= ============ ==================================================

A line ``# also KEY: ...`` in an option file has names of this key, e.g. of an argument of the option's function. A
name with dots is found as a whole, or by its last part (``trainer.gradient_clip_val``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

from runner.config.compose.field_comments import FieldComment, also_of, field_comments
from runner.config.compose.groups import groups, options, shipped_conf
from runner.config.schema import RunConfig
from runner.errors import Problem, did_you_mean

__all__ = ["ACCUMULATED", "Meant", "Synonym", "meant", "no_option", "option_called", "synonyms"]


_FORMER = {("optimizer", "zero_one_adam"): ("onebit_adam_refreshed", "0/1 Adam's local steps are not implemented")}
"""Names that options had, each with the present one and why it is another."""


_LACKING = dict.fromkeys(
    (("precision", name) for name in ("fp8", "fp8_mixed", "transformer-engine")),
    ("bf16_mixed", "Products of numbers of 8 bits are not implemented; it computes those of 16"),
)
"""Names of what other tools have, each with the option that comes nearest and why it is another."""

ACCUMULATED = ("accumulate_grad_batches", "gradient_accumulation_steps")
"""Names for the number of batches whose gradients one step adds, each of them of the batch size."""

_ACCUMULATED = "the parts of an optimizer step; data.batch_size has the samples of all of them, so multiply that too"


@dataclass(frozen=True, slots=True)
class Synonym:
    """A word of another tool.

    Args:
        name: a key or the name of an option, as the other tool writes it.
        value: the value beside the name for which it holds; None: any.
        key: ours, or our group.
        ours: our value or option; None: the same value.
        about: what the key is; empty for an option.
        is_value: whether ``name`` is a value of ``key``, and not a key.
    """

    name: str
    value: str | None
    key: str
    ours: str | None
    about: str
    is_value: bool = False


@dataclass(frozen=True, slots=True)
class Meant:
    """Our key for one of another tool.

    Args:
        key: ours, or our group.
        value: ours; None: the same value.
        about: what the key is; empty for a group.
    """

    key: str
    value: str | None
    about: str


def meant(path: str, value: object) -> Meant | None:
    """What an override that no key has means, if another tool has it.

    Args:
        path: its key.
        value: its value, as a plain container.
    """
    shown, last = _plain(value), path.rpartition(".")[2]
    if last != path and last in groups() and (chosen := option_called(last, value)) is not None:
        return Meant(last, chosen, "")
    for name in dict.fromkeys((path, last)):
        known = [each for each in _by_name().get(name.casefold(), ()) if each.value in (None, shown)]
        found = next((each for each in known if each.value is not None), known[0] if known else None)
        if found is None:
            continue
        chosen = option_called(found.key, value) if found.ours is None and found.key in groups() else None
        about = _ACCUMULATED if found.name in ACCUMULATED else found.about
        return Meant(found.key, chosen if chosen is not None else found.ours, about)
    return None


def option_called(group: str, value: object) -> str | None:
    """The option of a group that another tool calls so, or the option of this name; None if there is none."""
    shown, known = _plain(value), options(group, (shipped_conf(),))
    if shown in known:
        return shown
    called = {each.name.casefold(): str(each.ours) for each in synonyms() if each.is_value and each.key == group}
    return ({name.casefold(): name for name in known} | called).get(shown.casefold())


def no_option(group: str, value: object, known: Collection[str]) -> Problem:
    """The problem of a name that no option of the group has."""
    former = _FORMER.get((group, str(value)))
    if former is not None:
        present, why = former
        return Problem(group, value, f"it is called {present}", why, f"{group}={present}")
    lacking = _LACKING.get((group, str(value)))
    if lacking is not None:
        nearest, why = lacking
        return Problem(group, value, "there is no such option", why, f"{group}={nearest}")
    if group == "model" and (Path(str(value)) / "config.json").is_file():
        rule, why = "a folder of Hugging Face is no option", "It is read by model=huggingface"
        return Problem(group, value, rule, why, f"model=huggingface model.pretrained={value}")
    fix = _own_target(group, str(value), known)
    if fix:
        return Problem(group, value, "a function of yours is no option", "It is read by another key", fix)
    near = option_called(group, value)
    if near not in known:
        alike = [each for each in known if len(each) == len(str(value))]  # where several are near, these are nearer
        near = (did_you_mean(str(value), known) or did_you_mean(str(value), alike)) if value is not None else None
    fix = f"{group}={near}" if near is not None else ""
    return Problem(group, value, "there is no such option", f"{group} has {', '.join(known)}", fix)


def _own_target(group: str, value: str, known: Collection[str]) -> str:
    """The override by which a group takes a function of the user's, if it takes one and ``value`` names one."""
    module, _, name = value.partition(":")
    if not (name.isidentifier() and module.replace(".", "").isidentifier()):
        return ""
    if group == "callbacks":
        return f"{group}.{name.casefold()}.target={value}"
    return f"{group}=custom {group}.target={value}" if "custom" in known else ""


@cache
def synonyms() -> tuple[Synonym, ...]:
    """All words of other tools that stand beside a key or an option."""
    return (*_of_section(RunConfig, ""), *_of_options())


@cache
def _by_name() -> dict[str, tuple[Synonym, ...]]:
    found: dict[str, tuple[Synonym, ...]] = {}
    for each in synonyms():
        if not each.is_value:
            found[each.name.casefold()] = (*found.get(each.name.casefold(), ()), each)
    return found


def _of_section(section: type, prefix: str) -> Iterator[Synonym]:
    hints = get_type_hints(section)
    for item in fields(section):
        path = f"{prefix}{item.name}"
        beside = FieldComment(item.metadata.get("about", ""), item.metadata.get("also", ()))
        comment = field_comments().get((section.__name__, item.name), beside)
        for entry in comment.also:
            word, _, ours = (part.strip() for part in entry.partition("->"))
            name, _, value = word.partition("=")
            yield Synonym(name, value or None, path, ours or None, comment.about)
        if is_dataclass(hints[item.name]):
            yield from _of_section(hints[item.name], f"{path}.")


def _of_options() -> Iterator[Synonym]:
    for group in groups():
        for option in options(group, (shipped_conf(),)).values():
            for line in option.path.read_text(encoding="utf-8").splitlines():
                key, entries = also_of(line)
                for entry in entries:
                    name, equals, value = entry.partition("=")
                    if key:
                        yield Synonym(name, value or None, key, None, f"an argument of {group}={option.name}")
                    else:
                        yield Synonym(name, value or None, group, option.name, "", is_value=not equals)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
