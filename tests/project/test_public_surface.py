"""What the README and the option files say exists does, and what exists is said."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import readme
from readme import ROOT

from runner.cli.commands import COMMANDS
from runner.config.compose.groups import first_comment, shipped_conf

OPTION_FILES = sorted(shipped_conf().glob("*/**/*.yaml"))
MACHINE_PATH = re.compile(r"(?<![\w.~])/(home|root|Users|work|workspace|opt|mnt|data|scratch)/\w")


def tracked_files() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("this is no git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_table_of_commands_is_the_commands() -> None:
    rows = readme.table("Commands")
    assert [readme.quoted(row[0])[0].split()[1] for row in rows] == list(COMMANDS)


def test_the_tables_flags_exist() -> None:
    for name, what in readme.table("Commands"):
        command = COMMANDS[readme.quoted(name)[0].split()[1]]
        flags = {flag for each in command.flags for flag in (each.name, each.short)}
        named = {word.strip("[]") for word in (name + " " + what).replace("`", " ").replace(",", " ").split()}
        assert {word for word in named if word.startswith("-")} <= flags


@pytest.mark.parametrize("path", OPTION_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_option_says_what_it_is(path: Path) -> None:
    comment = first_comment(path)
    assert len(comment.split()) >= 3, f"{path}: the first comment says what the option does, and its source"


def test_a_recipes_first_comment_is_its_command() -> None:
    for path in sorted((shipped_conf() / "recipe").glob("*.yaml")):
        command = first_comment(path)
        assert re.match(r"runner (train|plan)\b", command), path
        assert path.stem in command or "default" in command, path


def test_pictures_and_links_of_the_documents_are_there() -> None:
    broken = []
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md")]
    for name in sorted(str(path.relative_to(ROOT)) for path in documents):
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target and not ((ROOT / name).parent / target).exists():
                broken.append(f"{name}: {target}")
    assert broken == []


def test_no_path_of_a_machine_is_tracked() -> None:
    found = []
    for name in tracked_files():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    assert found == []


def test_large_files_are_not_tracked() -> None:
    assert [name for name in tracked_files() if (ROOT / name).stat().st_size > 500_000] == []
