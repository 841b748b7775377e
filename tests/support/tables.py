"""Tables of documents, made of what kinds and option files say of themselves.

``python tests/support/tables.py --write`` puts them into the documents; without the flag it prints them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from runner.config.compose.groups import groups, options, shipped_conf
from runner.config.compose.keys import keys_of, sections
from runner.config.rules.sections import CONFIG_TABLES, KNOWN_NAMES
from runner.optim.catalogue.registry import OPTIMIZERS
from runner.plan.planners.published.registry import KINDS
from runner.schedule.catalogue.registry import ALIASES, SPECS, build
from runner.schedule.kinds import ScheduleSpec
from runner.schedule.simulation.clock import Costs, simulate
from runner.schedule.steady import period

ROOT = Path(__file__).resolve().parents[2]
README, SCHEDULES, PLANNING = ROOT / "README.md", ROOT / "docs" / "schedules.md", ROOT / "docs" / "planning.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"
KEYS: dict[str, tuple[str, ...]] = {f"Keys of {each}": (each,) for each in sections() if list(keys_of((each,)))}
KEYS |= {"Keys of a run": tuple(each.path for each in keys_of(None) if "." not in each.path)}
"""Headings, and the sections whose keys stand below them."""
PAGES = {
    README: ("Policies",),
    SCHEDULES: ("Schedules", "Optimizers"),
    PLANNING: ("Published planners",),
    CONFIGURATION: tuple(KEYS),
}
"""The documents with tables, and the headings above these."""
RANKS, MICROBATCHES = 4, 16
_GROUP = re.compile(r"  - (\w+): (\w+)$")
_COST = "    # "
_ONE_OF = "must be one of "
_TYPES = {
    "bool": "true, false",
    "int": "whole number",
    "float": "number",
    "str": "text",
    "list": "list",
    "dict": "names with values",
    "Any": "any",
}


def policies() -> list[list[str]]:
    """A row per group that has a choice: its options, and what they cost as ``conf/config.yaml`` says it."""
    found: dict[str, list[str]] = {}
    defaults = {}
    for line in (shipped_conf() / "config.yaml").read_text(encoding="utf-8").splitlines():
        if (header := _GROUP.match(line)) is not None:
            group, defaults[group] = header[1], header[2]
            found[group] = []
        elif line.startswith(_COST):
            found[group].append(line.removeprefix(_COST))
    assert set(found) == set(groups()), "conf/config.yaml names every group"
    rows = []
    for group, cost in found.items():
        names = _options_of(group, defaults[group])
        if len(names) > 1:
            assert cost, f"conf/config.yaml says below {group} what its options cost"
            rows.append([f"`{group}`", ", ".join(f"`{name}`" for name in names), " ".join(cost)])
    return rows


def _options_of(group: str, default: str) -> list[str]:
    """In the order of their kinds, else the default first; ``none`` first, and what is a user's or is found last."""
    shipped = list(options(group, (shipped_conf(),)))
    if group == "schedule":
        ordered: Iterable[str] = (name for spec in SPECS.values() for name in (spec.name, *_aliases(spec)))
    else:
        ordered = KNOWN_NAMES.get(group, (default,))
    known = sorted((name for name in ordered if name in shipped), key=lambda name: name != "none")
    rest = [name for name in shipped if name not in known]
    last = [name for name in (*known, *rest) if name in ("custom", "auto") and name != default]
    return [*(name for name in (*known, *rest) if name not in last), *last]


def schedules() -> list[list[str]]:
    """A row per schedule: idle share and most micro-batches kept, simulated, and what it does, and its price."""
    rows = []
    for spec in sorted(SPECS.values(), key=lambda spec: spec.by_plan):
        assert spec.summary, f"{spec.name} has no summary"
        names = ", ".join(f"`{name}`" for name in (spec.name, *_aliases(spec)))
        rows.append([names, *(_figures(spec) if spec.figures is None else spec.figures), spec.summary])
    return [*rows, ["`custom`", "", "", "the order that `schedule.target`, your own function, returns"]]


def _figures(spec: ScheduleSpec) -> tuple[str, str]:
    schedule = build(spec.name, ranks=RANKS, microbatches=MICROBATCHES, chunks=spec.default_chunks)
    played = simulate(schedule, Costs())
    idle = played.bubble_ratio
    if schedule.is_asynchronous:  # one step of many, which follow each other without a flush
        idle = 1.0 - sum(played.busy) / (RANKS * schedule.windows // schedule.interval) / period(schedule, Costs())
    return f"{idle:.3f}", f"{max(played.peak_activations):g}"


def _aliases(spec: ScheduleSpec) -> list[str]:
    return [alias for alias, meant in ALIASES.items() if meant == spec.name]


def optimizers() -> list[list[str]]:
    """A row per optimizer: what it does, what it keeps, what else is to be known."""
    assert all(kind.description and kind.cost for kind in OPTIMIZERS.values())
    ordered = [OPTIMIZERS[name] for name in _options_of("optimizer", next(iter(OPTIMIZERS)))]
    return [[f"`{kind.name}`", kind.description, kind.cost, kind.remarks] for kind in ordered]


def planners() -> list[list[str]]:
    """A row per published planner: what it chooses, how, and what its model leaves out."""
    return [[f"`{name}`", kind.chooses, kind.by, kind.lacks] for name, kind in KINDS.items()]


def keys(names: Sequence[str]) -> list[list[str]]:
    """A row per key of some sections: its default, its values, and what it means."""
    return [
        [f"`{key.path}`", f"`{key.default}`", _values(key.path, key.kind), key.about.replace("<", "&lt;")]
        for key in keys_of(names)
    ]


def _values(path: str, kind: str) -> str:
    """The names among which a rule lets choose, else the type."""
    said = [rule.rule for table in CONFIG_TABLES for rule in table.rules if rule.path == path]
    known = next((each.removeprefix(_ONE_OF) for each in said if each.startswith(_ONE_OF)), "")
    parts = [_TYPES.get(part.partition("[")[0], part) for part in kind.split(" | ") if part != "None"]
    return (known or " or ".join(dict.fromkeys(parts))) + (", null" if kind.endswith("| None") else "")


TABLES: dict[str, tuple[Sequence[str], Callable[[], list[list[str]]]]] = {
    "Policies": (("group", "options", "what it costs"), policies),
    "Schedules": (("`schedule=`", "idle", "kept", "what it does, and its price"), schedules),
    "Published planners": (("planner", "chooses", "by", "its model lacks"), planners),
    "Optimizers": (("`optimizer=`", "what it does", "values per parameter", "remarks"), optimizers),
    **{heading: (("key", "default", "values", "means"), partial(keys, names)) for heading, names in KEYS.items()},
}
"""Headings with the header and the rows of the table below."""


def table(heading: str) -> str:
    """In Markdown, one line a row, with a line's end."""
    header, rows = TABLES[heading]
    return "".join(map(_line, [header, ["---"] * len(header), *rows()]))


def _line(cells: Sequence[str]) -> str:
    if set(cells) == {"---"}:
        return "|" + "---|" * len(cells) + "\n"
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n"


def with_tables(text: str, headings: Iterable[str]) -> str:
    """A document with the first table below each of the headings made anew."""
    for heading in headings:
        before, marker, rest = text.partition(f"## {heading}\n")
        assert marker, f"there is a heading {heading}"
        made = re.sub(r"(?:^\|.*\n)+", lambda _, heading=heading: table(heading), rest, count=1, flags=re.MULTILINE)  # type: ignore[misc]
        text = before + marker + made
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for page, headings in PAGES.items():
            page.write_text(with_tables(page.read_text(encoding="utf-8"), headings), encoding="utf-8")
    else:
        print("\n".join(f"## {heading}\n\n{table(heading)}" for heading in TABLES))
