"""What the README and the option files say exists does, and what exists is said."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import readme
from readme import ROOT

from runner.cli.commands import COMMANDS
from runner.config.compose.groups import first_comment, groups, options, shipped_conf
from runner.recipes.schedules.computed import compute
from runner.recipes.schedules.rows import Row
from runner.schedule.catalogue.registry import SPECS

ROOTS = (shipped_conf(),)
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


def test_the_table_of_policies_is_the_options() -> None:
    """Groups that so far have no choice but ``none`` or one launcher stand in no table."""
    rows = {readme.quoted(row[0])[0]: readme.quoted(row[1]) for row in readme.table("Policies")}
    shipped = {group: sorted(options(group, ROOTS)) for group in groups()}
    choices = {group: names for group, names in shipped.items() if len(names) > 1}
    assert {group: sorted(names) for group, names in rows.items()} == choices


@pytest.mark.parametrize(("heading", "group"), [("Schedules", "schedule"), ("Optimizers", "optimizer")])
def test_a_groups_own_table_has_all_its_options(heading: str, group: str) -> None:
    rows = readme.table(heading)
    assert sorted(name for row in rows for name in readme.quoted(row[0])) == sorted(options(group, ROOTS))


def test_idle_and_kept_of_the_table_of_schedules_are_the_simulators() -> None:
    told = {readme.quoted(row[0])[0]: row[1:3] for row in readme.table("Schedules") if row[1] and row[2]}
    del told["pipefisher"]  # its bubbles are filled
    found = {}
    for name in told:
        known = compute(Row(name, SPECS[name].default_chunks), ranks=4, microbatches=16)
        idle = known.simulated_in_a_row if SPECS[name].kind == "asynchronous" else known.simulated
        found[name] = [f"{idle:.3f}", f"{max(known.simulated_activations):g}"]
    assert told == found


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
