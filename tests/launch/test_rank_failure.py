"""What a rank says of the exception that ended it."""

from __future__ import annotations

import pytest

from runner.launch.failure import RankFailure

GLOO = "[/build/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 21000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError(GLOO), "RuntimeError: a message between ranks timed out after 21 s: a rank hangs, or"),
        (RuntimeError("something else"), "RuntimeError: something else"),
        (KeyError("name"), "KeyError: 'name'"),
    ],
)
def test_the_summary_is_for_people(error: BaseException, told: str) -> None:
    summary = RankFailure.of(error).summary()
    assert summary.startswith(told)
    assert ".cc" not in summary


def _interrupts() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_for_which_lightning_exits_is_told_with_its_place() -> None:
    try:
        try:
            _interrupts()
        except KeyboardInterrupt:
            raise SystemExit(1)  # noqa: B904 (as Lightning does it)
    except SystemExit as error:
        summary = RankFailure.of(error).summary()
    assert summary.startswith("KeyboardInterrupt (")
    assert summary.endswith("in _interrupts)")
