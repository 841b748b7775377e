"""The table of the chosen layout and of those that differ in kind from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.plan.planners.choose import Chosen
from runner.plan.planners.told import runners_up_text


def _choice(told: str, schedule: str, **lack: Any) -> Any:
    answer = SimpleNamespace(
        pipeline=8,
        data=4,
        tensor=2,
        order=SimpleNamespace(schedule=schedule),
        microbatches=128,
        kept=("selective",),
        moved=(0,),
        zero=1,
        states_in_host=True,
    )
    plan = SimpleNamespace(
        profile=SimpleNamespace(samples=1),
        fits=not lack,
        lacks_bytes=lack.get("bytes", 0),
    )
    return SimpleNamespace(answer=answer, plan=plan, told=told, seconds=58.5, peak=74_100_000_000, keys={})


@pytest.mark.parametrize("width", [80, 120])
def test_names_of_schedules_are_whole_and_lines_are_no_longer_than_allowed(width: int) -> None:
    others = [_choice("no recomputation", "v_half"), _choice("no pipeline", "1f1b", bytes=25_800_000_000)]
    chosen = cast(Chosen, SimpleNamespace(best=_choice("", "interleaved_1f1b"), runners_up=others))
    text = runners_up_text(chosen, width)
    assert max(map(len, text.splitlines())) <= width
    assert "interleaved_1f1b" in text
    assert " ".join(text.split()).endswith("no pipeline, lacks 25.8 GB") or "no pipeline, lacks 25.8 GB   8·4·2" in text
    assert ("1: chosen; 2: no recomputation;" in text) == (width == 80)
