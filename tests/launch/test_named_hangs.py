"""Of ranks that stand still, the one for which the others wait is named first, and in the last line that is printed."""

from __future__ import annotations

import sys
from pathlib import Path
from traceback import FrameSummary

import pytest

import runner
from runner.launch.local import ranks
from runner.launch.local.ranks import Launch, Outcome
from runner.launch.processes.overdue import Watch
from runner.launch.processes.supervise import Ending, ProcessSpec, supervise
from runner.pulse import NO_PROGRESS, PULSES_VARIABLE, Phase, Pulse, Pulses
from runner.record import hang_file
from runner.training import watchdog

ROOT = Path(runner.__file__).parents[1]
WAITS = "rank 0 in step 12, last at 0B0 (stage 0, layers 0..0), waiting for other ranks"
STANDS = "rank 1 in step 12, last at 1F0 (stage 1, layers 1..1), at mine.py:9 in rest"
SILENT = "rank 2 does not say where it is, as one that hangs outside Python"
NATIVE = """
import ctypes
from runner.pulse import Pulse

def spin():
    Pulse.begin()
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(1000)

spin()
"""


def test_who_waits_is_named_last() -> None:
    assert watchdog._causes_first([WAITS, STANDS, ""]) == [SILENT, STANDS, WAITS]


@pytest.mark.parametrize(
    ("inner", "waits"),
    [
        (["runner/engine/actions/messages.py"], True),
        (["runner/engine/transport/threads.py", "/usr/lib/python3.11/threading.py"], True),
        (["/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"], True),
        (["runner/engine/actions/compute.py", "/srv/me/mine.py"], False),
        (["runner/engine/actions/compute.py", "/venv/lib/python3.11/site-packages/torch/nn/linear.py"], False),
        (["runner/engine/actions/compute.py", "/srv/me/mine.py", "/usr/lib/python3.11/threading.py"], False),
        (["runner/zoo/gpt.py"], False),
    ],
)
def test_who_waits_is_in_the_engines_own_code(inner: list[str], waits: bool) -> None:
    files = [str(ROOT / name) if name.startswith("runner") else name for name in inner]
    assert watchdog._is_waiting([FrameSummary(file, 1, "f") for file in files]) == waits


def test_a_rank_that_cannot_speak_is_asked_where_it_is(tmp_path: Path) -> None:
    """Rank 0 ends itself, as its watchdog does, while rank 1 holds the interpreter's lock in native code."""
    (tmp_path / "native.py").write_text(NATIVE)
    pulses, log = Pulses(2), tmp_path / "log"
    for rank in range(2):
        Pulse(pulses._memory, rank).enter(Phase.STEP)
    Pulse(pulses._memory, 0).say(f"{NO_PROGRESS} 8 s: {WAITS}")
    variables = {PULSES_VARIABLE: str(pulses.fileno()), "RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    waiting = f"until grep -q ready {log}; do sleep 0.05; done; exit 1"
    specs = [
        ProcessSpec(["sh", "-c", waiting], {}),
        ProcessSpec([sys.executable, str(tmp_path / "native.py")], variables, log, pass_fds=(pulses.fileno(),)),
    ]
    ending = supervise(specs, grace_seconds=lambda: 1.0, watch=Watch(pulses, {}))
    pulses.close()
    assert ending.failed == (0, 1)
    assert dict(ending.overdue) == {1: "it stood still outside Python, at native.py:8 in spin"}


def test_one_that_works_is_not_asked() -> None:
    pulses = Pulses(2)
    Pulse(pulses._memory, 1).enter(Phase.STEP)
    Pulse(pulses._memory, 0).say(STANDS)  # it stood still once, went on, and failed later
    assert Watch(pulses, {}).silent([1], [0]) == []
    Pulse(pulses._memory, 0).say(f"{NO_PROGRESS} 8 s: {WAITS}")
    assert Watch(pulses, {}).silent([1], [0]) == [1]
    Pulse(pulses._memory, 1).say(STANDS)
    assert Watch(pulses, {}).silent([1], [0]) == []
    pulses.close()


def _outcome(tmp_path: Path, ending: Ending, said: dict[int, str]) -> Outcome:
    launch = Launch(tmp_path / "config.yaml", tmp_path, 2, 1, lambda rank: f"stage {rank}")
    (tmp_path / "logs").mkdir()
    for rank, text in said.items():
        if text.startswith(NO_PROGRESS):
            hang_file(tmp_path, rank).write_text(f"{text}\n\n{WAITS}\n")
    return ranks._outcome(launch, ending, ranks._Left({}, said), killed_for_memory=False)


def test_the_last_line_names_the_rank_outside_python(tmp_path: Path) -> None:
    outside, told = "it stood still outside Python, at native.py:8 in spin", f"{NO_PROGRESS} 8 s: {SILENT}; {WAITS}"
    outcome = _outcome(tmp_path, Ending((1, -9), (0, 1), None, {1: outside}), {0: told, 1: outside})
    assert list(outcome.lines) == [f"{told}; see {hang_file(tmp_path, 0)}", f"rank 1 (stage 1) was ended: {outside}"]


def test_ranks_that_tell_the_same_are_one_line(tmp_path: Path) -> None:
    told = f"{NO_PROGRESS} 8 s: {STANDS}; {WAITS}"
    outcome = _outcome(tmp_path, Ending((1, 1), (0, 1), None), {0: told, 1: told})
    assert list(outcome.lines) == [f"{told}; see {hang_file(tmp_path, 1)}"]
