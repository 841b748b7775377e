"""What holds for every test: which are chosen, and that none is left out unseen."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from full_slices import SLICES, SLOW_SLICES, Slice, read_slice
from skips import reasons, unexpected
from slow_tests import slow_files

_ALL_BUT_FULL = "not full"
_LONGEST = 900  # seconds
_SLICED = {"full": SLICES, "slow": SLOW_SLICES}
"""The markers whose tests have slices, and how many ``commit`` makes of them; what is full is slow, too."""
_WITH_OWN_CACHE = {"model", "strategy", "training"}
"""Folders in which what a file's tests measure of models is not found by other files' tests."""
_STOPS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True, scope="module")
def _own_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name in _WITH_OWN_CACHE:
            patch.setenv("RUNNER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A command that ran in this process ignores signals from its end on; children of later tests would keep that."""
    before = {number: signal.getsignal(number) for number in _STOPS}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that ran in this process leaves the handlers of its own standard error behind."""
    log = logging.getLogger("runner")
    handlers, level, propagate, disabled = log.handlers[:], log.level, log.propagate, log.disabled
    yield
    log.handlers[:], log.level, log.propagate, log.disabled = handlers, level, propagate, disabled


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-slice",
        metavar="N/COUNT",
        help="of the tests marked full, run slice N of COUNT, beside all others; every such test is in exactly one "
        f"slice, by a hash of its node id. 'commit' is slice N of {SLICES} where N is the commit's hash modulo "
        f"{SLICES}, so that successive commits run all of them over time. -m chooses among what is left.",
    )
    parser.addoption(
        "--slow-slice",
        metavar="N/COUNT",
        help=f"the same for the other slow tests, of which 'commit' chooses one of {SLOW_SLICES} slices.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read the slices once, here: workers of pytest-xdist get what was read.

    A shell starts commands in its background with SIGINT ignored, and their children would keep that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for option, count in _SLICED.items():
        asked = config.getoption(f"--{option}-slice")
        if asked is None:
            continue
        try:
            setattr(config.option, f"{option}_slice", str(read_slice(asked, config.rootpath, count)))
        except ValueError as error:
            raise pytest.UsageError(f"--{option}-slice {error}") from None
    if config.getoption("--full-slice") and config.option.markexpr == _ALL_BUT_FULL:
        config.option.markexpr = ""  # the default would leave the slice out again


def pytest_report_header(config: pytest.Config) -> list[str]:
    asked = {option: config.getoption(f"--{option}-slice") for option in _SLICED}
    return [f"slice {slice_} of the tests that are {option}" for option, slice_ in asked.items() if slice_ is not None]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what takes long and parts of whole matrices, and leave the tests of other slices out.

    ``-m "not slow"`` replaces the default, which leaves what is full out.
    """
    slow = slow_files()
    for item in items:
        if item.get_closest_marker("full") or item.nodeid.partition("::")[0].removeprefix("tests/") in slow:
            item.add_marker("slow")
    for option, count in _SLICED.items():
        asked = config.getoption(f"--{option}-slice")
        if asked is not None:
            _keep_slice(config, items, option, read_slice(asked, config.rootpath, count))


def _keep_slice(config: pytest.Config, items: list[pytest.Item], kind: str, chosen: Slice) -> None:
    """Leave out the tests of one kind that are not in a slice."""
    others = [
        item
        for item in items
        if _kind(item) == kind and (not chosen.has(item.nodeid) or (kind == "full" and _waits(item, chosen)))
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]


def _kind(item: pytest.Item) -> str:
    return next((kind for kind in _SLICED if item.get_closest_marker(kind)), "")


def _waits(item: pytest.Item, chosen: Slice) -> bool:
    """Whether a test has a limit of time of its own for which a part of the suite cannot wait."""
    limit = item.get_closest_marker("timeout")
    return chosen.count > 1 and limit is not None and bool(limit.args) and limit.args[0] > _LONGEST


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a test was skipped that should not be; ``CI=true`` says so."""
    if unexpected(_skipped(session.config), os.environ) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = _skipped(config)
    for reason, count in found.items():
        terminalreporter.write_line(f"skipped, {count}: {reason}")
    for reason in unexpected(found, os.environ):
        terminalreporter.write_line(f"not to be skipped where CI=true: {reason}", red=True)


def _skipped(config: pytest.Config) -> dict[str, int]:
    """Nothing in workers of pytest-xdist, whose reports go to the process that prints."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return {} if reporter is None else reasons(reporter.stats.get("skipped", []))
