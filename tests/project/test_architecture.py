"""Imports go one way: each room stands on rooms below it, and the lower ones start without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from rank_imports import OF_BOTH, OF_THE_COMMAND

ROOT = Path(__file__).resolve().parents[2]

_REQUEST = {"errors", "options", "targets", "config.schema", "optim.catalogue", "config"}
_FOUNDATION = _REQUEST | {
    "",
    "noise",
    "progress",
    "late",
    "files",
    "environment",
    "record",
    "parent",
    "printable",
    "pulse",
    "reads",
    "moved_loads",
    "stored",
    "profile",
    "schedule",
    "memory.solve",
    "plan",
}
_TRAINED = _FOUNDATION | {"optim", "memory", "model", "profiling", "engine", "checkpoint"}

# A room and the rooms it may import, "" being the package itself (its version). docs/design.md says why.
MAY_IMPORT = {
    "": {"asserted"},
    "asserted": set(),
    "environment": {""},
    "files": set(),
    "parent": set(),
    "printable": set(),
    "stored": set(),
    "pulse": set(),
    "record": {"environment", "files"},
    "errors": {"printable"},
    "options": {"errors"},
    "reads": set(),
    "moved_loads": set(),
    "targets": {"errors", "reads"},
    "profile": set(),
    "noise": set(),
    "progress": set(),
    "late": set(),
    "config.schema": {"errors", "options", "memory.solve", "schedule"},
    "optim.catalogue": {"errors", "targets", "config.schema"},
    "config": {"errors", "options", "files", "targets", "config.schema", "optim.catalogue", "memory.solve", "schedule"},
    "schedule": {"errors", "moved_loads", "options", "printable", "targets"},
    "memory.solve": {"errors", "options", "noise", "progress", "targets", "profile"},
    "plan": _REQUEST | {"files", "moved_loads", "stored", "profile", "progress", "schedule", "memory.solve"},
    "report": {"errors", "printable", "config.schema", "config", "record"},
    "zoo": set(),
    "optim": _FOUNDATION,
    "model": (_FOUNDATION | {"optim"}) - {"schedule"},
    "profiling": _FOUNDATION | {"optim", "model"},
    "memory": _FOUNDATION | {"optim", "model", "profiling"},
    "engine": _FOUNDATION | {"optim", "memory", "model"},
    "checkpoint": _FOUNDATION | {"optim", "model"},
    "strategy": _TRAINED,
    "training": _TRAINED | {"strategy"},
    "api": _TRAINED | {"strategy", "training", "launch"},
    "launch": _TRAINED | {"strategy", "training", "report"},
    "cli": _TRAINED | {"strategy", "training", "report", "launch"},
    "__main__": {"cli"},
}
# What functions of a room may import besides, when they are called: an optimizer's maker, and names of types.
WHEN_CALLED = {"optim.catalogue": {"optim", "engine", "profiling"}}

# Parts of rooms that count as rooms of their own, because other rooms stand on them alone.
PARTS = {
    "memory.solve": ("runner.memory.solve",),
    "optim.catalogue": ("runner.optim.catalogue", "runner.optim.blocks"),
    "config.schema": (
        "runner.config.schema",
        "runner.config.compose.field_comments",
        "runner.config.compose.groups",
        "runner.config.compose.shape",
        "runner.config.compose.synonyms",
        "runner.config.rules.table",
        "runner.config.rules.values",
    ),
}
WITHOUT_TORCH = (
    *(
        "errors",
        "noise",
        "progress",
        "late",
        "files",
        "parent",
        "options",
        "printable",
        "pulse",
        "profile",
        "environment",
        "record",
        "targets",
        "config.schema",
        "optim.catalogue",
        "config",
    ),
    *("schedule", "memory.solve", "plan", "report", "cli"),
)
NEVER_TOGETHER = [
    *((room, "torch") for room in WITHOUT_TORCH if room not in ("cli", *WHEN_CALLED)),
    *((room, "lightning") for room in ("model", "profiling", "memory", "optim", "engine", "zoo")),
    *(
        (room, "hydra")
        for room in ("model", "profiling", "memory", "optim", "engine", "checkpoint", "strategy", "training", "zoo")
    ),
]


def room_of(module: str) -> str:
    """``plan`` for ``runner.plan.make``; a part of a room that counts as one of its own is told apart."""
    for room, prefixes in PARTS.items():
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes):
            return room
    return "".join(module.split(".")[1:2])


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(folder: str) -> list[Path]:
    """Python files under ``folder``, without the links to the folders beside the package."""
    links = (ROOT / "runner" / "recipes", ROOT / "runner" / "conf")
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if not any(path.is_relative_to(x) for x in links)]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Every module that a file imports, anywhere in it, with the line."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: absolute imports only"
            if node.module == "runner":
                found = [(ROOT / "runner" / f"{x.name}.py", ROOT / "runner" / x.name, x.name) for x in node.names]
                yield from (
                    (node.lineno, f"runner.{name}" if file.exists() or folder.exists() else "runner")
                    for file, folder, name in found
                )
            else:
                yield node.lineno, str(node.module)


def lines_of_late_imports(path: Path) -> set[int]:
    """Lines of imports that an import of the file does not run: in functions, or for the types alone."""
    tree = tree_of(path)
    for_types = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        inner.lineno
        for node in (*for_types, *functions)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }


def test_every_room_is_known() -> None:
    rooms = {room_of(name_of(path)) for path in sources("runner")}
    assert rooms - set(MAY_IMPORT) == set(), "say above, and in docs/design.md, what a new room may import"


def test_imports_go_one_way() -> None:
    wrong = []
    for path in sources("runner"):
        room = room_of(name_of(path))
        late = lines_of_late_imports(path)
        for line, module in imports(path):
            other = room_of(module)
            allowed = {room} | MAY_IMPORT[room] | (WHEN_CALLED.get(room, set()) if line in late else set())
            if module.split(".")[0] == "runner" and other not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} must not import {module}")
    assert wrong == []


def shelf_of(module: str) -> tuple[str, str] | None:
    """A room and a folder or file in it: ``plan``, ``search`` for ``runner.plan.search.choose``."""
    parts = module.split(".")
    return (parts[1], parts[2]) if len(parts) > 2 and parts[0] == "runner" else None


def lines_for_types(path: Path) -> set[int]:
    """Lines of imports that are never run."""
    body = tree_of(path).body
    blocks = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {inner.lineno for block in blocks for inner in ast.walk(block) if isinstance(inner, ast.stmt)}


def reached(start: str, needs: dict[str, set[str]]) -> set[str]:
    """All that a shelf needs, itself if it stands in a circle."""
    found, left = set[str](), [start]
    while left:
        new = needs.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def circles_of(graph: dict[str, set[str]]) -> list[str]:
    """The groups of shelves of a room of which each needs all others."""
    all_of = {shelf: reached(shelf, graph) for shelf in graph}
    return sorted({" ".join(sorted(b for b in all_of[a] if a in all_of.get(b, ()))) for a in graph if a in all_of[a]})


def needs_of_shelves() -> dict[str, dict[str, set[str]]]:
    """For each room, which of its other shelves each shelf imports, also in functions."""
    needs: dict[str, dict[str, set[str]]] = {}
    for path in sources("runner"):
        own, for_types = shelf_of(name_of(path)), lines_for_types(path)
        for line, module in imports(path):
            other = shelf_of(module)
            if own and other and own[0] == other[0] and own != other and line not in for_types:
                needs.setdefault(own[0], {}).setdefault(own[1], set()).add(other[1])
    return needs


def test_a_circle_is_found() -> None:
    graph = {"top": {"a"}, "a": {"b", "low"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}
    assert circles_of(graph) == ["a b c", "d e"]


def test_shelves_of_a_room_import_each_other_one_way() -> None:
    needs = needs_of_shelves()
    assert {"engine", "launch", "model", "plan"} <= set(needs)
    assert {room: found for room, graph in needs.items() if (found := circles_of(graph))} == {}


def test_rooms_know_nothing_of_what_is_not_theirs() -> None:
    wrong = []
    for path in sources("runner"):
        room = room_of(name_of(path))
        for line, module in imports(path):
            if (room, module.split(".")[0]) in NEVER_TOGETHER:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} must not import {module}")
    assert wrong == []


def test_recipes_are_plain_pytorch() -> None:
    """These recipes measure the runner, so that they may use it; every other one would run without it."""
    names = "asynchronous benchmarks faults finetune gpu offloading planners rematerialization schedules tensor"
    measuring = [["recipes", name] for name in names.split()]
    wrong = []
    for path in sources("recipes"):
        own = name_of(path).split(".")[:2]
        if own in measuring:
            continue
        for line, module in imports(path):
            if module.split(".")[0] == "runner" and module.split(".")[1:2] != ["recipes"]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {module}")
    assert wrong == []


@pytest.mark.costly
@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_the_lower_rooms_start_without_torch(room: str) -> None:
    """Imported in a fresh interpreter, module by module, not even something that imports torch is met."""
    modules = [name for path in sources("runner") if room_of(name := name_of(path)) == room]
    assert modules, f"there is no room {room}"
    code = f"import sys, {', '.join(modules)}\nprint(*sorted({{'torch', 'lightning', 'deepspeed'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.costly
def test_a_rank_measures_no_model_and_makes_no_plan() -> None:
    """What the command has found out before comes in files."""
    code = "import sys, runner.training.run\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=1500, check=True
    )
    assert [name for name in done.stdout.split() if name.startswith(OF_THE_COMMAND)] == [*OF_BOTH]
