"""The option files of ``conf/``: the groups, their options, and the description of each.

Reading them needs no Hydra, so that help answers at once. A user's own ``conf/`` in the working directory adds options
to those of the package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.errors import Problem, did_you_mean

__all__ = [
    "Option",
    "MAY_BE_NULL",
    "OF_USERS",
    "RECIPE",
    "clashes",
    "config_roots",
    "first_comment",
    "groups",
    "in_no_group",
    "no_group",
    "options",
    "package_of",
    "shipped_conf",
    "user_conf",
]

RECIPE = "recipe"  # the one group whose options are overrides of the whole request
MAY_BE_NULL = (RECIPE, "weight_prediction")  # groups of which a request may choose none

# Groups whose options may be kinds of a user's own, which need no name but their file's.
OF_USERS = (
    "activation_checkpoint",
    "compression",
    "lr_scheduler",
    "offload",
    "optimizer",
    "planner",
    "schedule",
    "weight_prediction",
)

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a group, and its file."""

    group: str
    name: str
    path: Path


def shipped_conf() -> Path:
    """The ``conf/`` folder of the package."""
    return Path(__file__).resolve().parents[2] / "conf"


def user_conf(working_directory: Path) -> Path | None:
    """``<working directory>/conf``, or None if there is none or it is the package's own."""
    folder = working_directory / "conf"
    if not folder.is_dir() or folder.resolve() == shipped_conf().resolve():
        return None
    return folder.resolve()


def config_roots(working_directory: Path) -> tuple[Path, ...]:
    """The folders that hold options, the package's first."""
    own = user_conf(working_directory)
    return (shipped_conf(),) if own is None else (shipped_conf(), own)


def groups() -> tuple[str, ...]:
    """The groups from which a request can choose, sorted."""
    return tuple(sorted(each.name for each in shipped_conf().iterdir() if each.is_dir() and each.name[0].isalpha()))


def options(group: str, roots: Sequence[Path]) -> dict[str, Option]:
    """The options of ``group`` by name, sorted; of two with the same name, the package's is returned."""
    found: dict[str, Option] = {}
    for root in roots:
        folder = root / group
        for path in sorted(folder.rglob("*.yaml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            found.setdefault(name, Option(group, name, path))
    return dict(sorted(found.items()))


def clashes(group: str, name: str, roots: Sequence[Path]) -> list[Problem]:
    """A problem if two files with different contents have the same option name, because neither may win silently."""
    files = [root / group / f"{name}.yaml" for root in roots]
    contents = {path: path.read_bytes() for path in files if path.is_file()}
    if len(set(contents.values())) < 2:
        return []
    own = files[-1]
    return [
        Problem(
            group,
            name,
            "two files have this name",
            f"{own} and the option that is shipped differ; give yours another name",
        )
    ]


def in_no_group(group: str, name: str, roots: Sequence[Path], *, is_known: bool) -> list[Problem]:
    """The problem of a user's option that lies in a folder which is no group, so that nobody reads it.

    Args:
        group, name: what a request chooses.
        is_known: whether the group has an option of this name. Then only a folder whose name is a slip counts.
    """
    for folder in sorted(each for root in roots[1:] for each in root.iterdir() if each.is_dir()):
        if folder.name in groups() or not (folder / f"{name}.yaml").is_file():
            continue
        if did_you_mean(folder.name, groups()) == group or not is_known:
            why = f"conf/{folder.name}/{name}.yaml lies in a folder that is no group; the nearest group is {group}"
            rule = f"there is no such option in conf/{group}"
            return [Problem(group, name, rule, why, _move(folder, f"{name}.yaml", group))]
    return []


def _move(folder: Path, file: str, group: str) -> str:
    """The command that puts an option where its group is: its file alone if the group has a folder already."""
    if (folder.parent / group).is_dir():
        return f"mv conf/{folder.name}/{file} conf/{group}/"
    return f"mv conf/{folder.name} conf/{group}"


def no_group(key: str, value: object, folder: Path) -> Problem:
    """The problem of a request that names a folder of the user's own ``conf/`` as if it were a group."""
    near = did_you_mean(key, groups())
    why = f"Nobody reads the folder conf/{key}; the groups are {', '.join(groups())}"
    fix = f"{_move(folder, f'{value}.yaml', near)} and {near}={value}" if near is not None else ""
    return Problem(key, value, "there is no such group", why, fix)


def first_comment(path: Path) -> str:
    """The description of an option: its first comment without the package header, in one line."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            if lines or line.strip():
                break
            continue
        text = line.lstrip("# ").rstrip()
        if not text and lines:
            break
        if text and not text.startswith("@package"):
            lines.append(text)
    return " ".join(lines)


def package_of(path: Path, group: str) -> str:
    """The section in which the file's keys belong: its ``# @package`` header, else its group."""
    header = _PACKAGE.search(path.read_text(encoding="utf-8"))
    return header[1] if header is not None else group.replace("/", ".")
