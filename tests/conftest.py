"""What holds for every test: it leaves no traces, and none is left out unseen."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import warm
from requests_of_commit import commit
from skips import reasons, unexpected

hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")  # one commit gives one outcome, wherever and whenever its tests run

_WITH_OWN_CACHE = {"model", "strategy", "training"}
"""Folders in which what a file's tests measure of models is not found by other files' tests."""
_WITH_FORKED_RANKS = {"checkpoint", "cli", "memory", "pretrained", "strangers", "training", "zero"}
"""Folders in which a command that runs in the process of the tests has its ranks forked, not executed."""
_WITH_MANY_CHILDREN = {"pretrained", "strangers"}
"""Folders whose models need libraries that take seconds to import."""
_COSTLY_SHARE = 10
"""Of so many costly cases one is run at each commit."""
_STOPS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True, scope="module")
def _own_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name in _WITH_OWN_CACHE:
            patch.setenv("RUNNER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _forked_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.parent.name in _WITH_FORKED_RANKS:
        monkeypatch.setattr("subprocess.Popen", warm.WarmRanks)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A command that ran in this process ignores signals from its end on; children of later tests would keep that."""
    before = {number: signal.getsignal(number) for number in _STOPS}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """Lightning leaves the place of a rank behind that it has started from here: a later test's script would be that
    rank, start no others, and wait for them."""
    before = {**os.environ}
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _modules_as_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a command imported here from a test's folder would hide those of other tests' folders."""
    yield
    folders = str(tmp_path_factory.getbasetemp())
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(folders):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that ran in this process leaves the handlers of its own standard error behind."""
    log = logging.getLogger("runner")
    handlers, level, propagate, disabled = log.handlers[:], log.level, log.propagate, log.disabled
    yield
    log.handlers[:], log.level, log.propagate, log.disabled = handlers, level, propagate, disabled


@pytest.fixture(autouse=True)
def _rank_as_before() -> Iterator[None]:
    """Ranks that were threads of this process leave the last one's number where Lightning's loggers look for theirs."""
    yield
    if (lightnings := sys.modules.get("lightning_utilities.core.rank_zero")) is not None:
        lightnings.rank_zero_only.rank = 0


def pytest_configure() -> None:
    """A shell starts commands in its background with SIGINT ignored, and their children would keep that.

    How long a command is at work is no matter of a test: what is said of it after half a minute is not said here.
    """
    os.environ.setdefault("RUNNER_PROGRESS_SECONDS", "86400")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """The seed that repeats what is drawn for this commit: ``python -m tests.property --seed``."""
    return f"seed of this commit, which draws requests and costly tests: {commit()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each folder's costly cases the commit draws one in ten; the others are ``full``.

    What is named runs whole: a file, or by ``-k`` the cases of one kind in all files. ``-k "not NAME"`` names nothing.
    """
    names_cases = config.option.keyword and not config.option.keyword.startswith("not ")
    if names_cases or any(Path(argument.split("::")[0]).is_file() for argument in config.args):
        return
    costly: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("costly"):
            costly[item.path.parent].append(item)
    for folder, cases in costly.items():
        drawn = random.Random(f"{commit()} {folder.name}").sample(cases, -(-len(cases) // _COSTLY_SHARE))
        for case in {*cases} - {*drawn}:
            case.add_marker("full")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: no collection of the runner's or of its children looks at it again.

    What many children of this process need, which makes models in children, is imported once.
    """
    if _WITH_MANY_CHILDREN & {item.path.parent.name for item in session.items}:
        for name in ("torch.fx.experimental.symbolic_shapes", "peft"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


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
