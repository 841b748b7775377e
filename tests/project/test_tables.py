"""The documents' tables are those that kinds and option files make, and every kind has its option file."""

from __future__ import annotations

import pytest
import readme
from tables import PAGES, TABLES, table, with_tables

from runner.config.compose.groups import options, shipped_conf
from runner.optim.catalogue.registry import COMPRESSORS, OPTIMIZERS
from runner.plan.planners.published.registry import PUBLISHED
from runner.recipes.schedules.computed import compute
from runner.recipes.schedules.rows import Row
from runner.schedule.catalogue.registry import NAMES, SPECS, build

ROOTS = (shipped_conf(),)


def test_the_documents_have_what_is_generated() -> None:
    assert sorted(heading for headings in PAGES.values() for heading in headings) == sorted(TABLES)
    for page, headings in PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert with_tables(text, headings) == text, "write it anew: python tests/support/tables.py --write"


@pytest.mark.costly
@pytest.mark.parametrize("heading", TABLES)
def test_a_table_that_was_changed_is_written_anew(heading: str) -> None:
    page, headings = next(each for each in PAGES.items() if heading in each[1])
    text = page.read_text(encoding="utf-8")
    row = table(heading).splitlines(keepends=True)[2]
    assert text.count(row) == 1
    assert with_tables(text.replace(row, "| stale | row |\n"), headings) == text
    assert with_tables(text.replace(row, ""), headings) == text


@pytest.mark.parametrize(
    ("group", "kinds"),
    [
        ("optimizer", OPTIMIZERS),
        ("compression", COMPRESSORS),
        ("schedule", (*NAMES, "custom")),
        ("planner", ("joint", *PUBLISHED)),
    ],
)
def test_every_kind_has_an_option_file_and_every_file_a_kind(group: str, kinds: object) -> None:
    assert sorted(options(group, ROOTS)) == sorted(kinds)  # type: ignore[call-overload]


def test_every_option_of_a_group_stands_in_its_tables() -> None:
    for row in readme.table("Policies"):
        group = readme.quoted(row[0])[0]
        assert sorted(readme.quoted(row[1])) == sorted(options(group, ROOTS))
    for heading, group in (("Schedules", "schedule"), ("Optimizers", "optimizer")):
        names = [name for row in readme.table(heading) for name in readme.quoted(row[0])]
        assert sorted(names) == sorted(options(group, ROOTS))


def test_idle_and_kept_are_those_of_the_recipe_that_measures_schedules() -> None:
    told = {readme.quoted(row[0])[0]: row[1:3] for row in readme.table("Schedules")}
    for name, figures in told.items():
        if name in SPECS and SPECS[name].figures is None:
            known = compute(Row(name, SPECS[name].default_chunks or 1, condition="any"), ranks=4, microbatches=16)
            idle = (
                known.simulated_in_a_row if build(name, ranks=4, microbatches=16).is_asynchronous else known.simulated
            )
            assert figures == [f"{idle:.3f}", f"{max(known.simulated_activations):g}"], name


def test_figures_in_words_are_those_of_the_schedule_that_is_filled() -> None:
    """PipeFisher's idle share is 1F1B's before its bubbles are filled."""
    words = SPECS["pipefisher"].figures
    assert words is not None
    assert words[0].split(",")[0] == {row[0]: row[1] for row in readme.table("Schedules")}["`1f1b`, `dapple`"]
