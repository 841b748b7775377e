"""What holds for every test: which are chosen."""

from __future__ import annotations

import pytest
from full_slices import SLICES, Slice, read_slice

_ALL_BUT_FULL = "not full"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-slice",
        metavar="N/COUNT",
        help="of the tests marked full, run slice N of COUNT, beside all others; every such test is in exactly one "
        f"slice, by a hash of its node id. 'commit' is slice N of {SLICES} where N is the commit's hash modulo "
        f"{SLICES}, so that successive commits run all of them over time. -m chooses among what is left.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read the option once, here: workers of pytest-xdist get what was read."""
    asked = config.getoption("--full-slice")
    if asked is None:
        return
    try:
        config.option.full_slice = str(read_slice(asked, config.rootpath))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if config.option.markexpr == _ALL_BUT_FULL:  # the default would leave the slice out again
        config.option.markexpr = ""


def pytest_report_header(config: pytest.Config) -> str | None:
    asked = config.getoption("--full-slice")
    return None if asked is None else f"slice {asked} of the tests marked full"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark parts of whole matrices as slow, too, and leave the full tests of other slices out.

    ``-m "not slow"`` replaces the default, which leaves what is full out.
    """
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker("slow")
    asked = config.getoption("--full-slice")
    if asked is not None:
        _keep_slice(config, items, read_slice(asked, config.rootpath))


def _keep_slice(config: pytest.Config, items: list[pytest.Item], chosen: Slice) -> None:
    others = [item for item in items if item.get_closest_marker("full") and not chosen.has(item.nodeid)]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
