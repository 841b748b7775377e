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
