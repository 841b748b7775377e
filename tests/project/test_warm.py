"""Commands that share their imports are processes as executed ones are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm
from processes import left_behind, working_in
from warm import Warm

SAYS = """
import os, sys
import torch
print(sys.argv, os.getcwd(), os.environ["SAID"], len(os.environ), os.getppid(), torch.get_num_threads(), __name__)
print(sys.stdin.read(), file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def start(directory: Path, code: str, *words: str) -> Warm:
    return Warm([sys.executable, "-c", code, *words], cwd=directory, env={}, stdout=subprocess.PIPE, text=True)


def wait_for(ready: Callable[[], object]) -> None:
    end = time.monotonic() + 1500
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_has_what_it_was_given_and_is_this_process_s_child(tmp_path: Path) -> None:
    environment = {"SAID": "so", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SAYS, "7", "b c"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Warm(command, cwd=tmp_path, env=environment, text=True, **pipes) as process:
        out, err = process.communicate("asked", timeout=1500)
    assert process.returncode == 7
    assert out == f"['-c', '7', 'b c'] {tmp_path} so 2 {os.getpid()} 1 __main__\n"
    assert err == "asked\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise ValueError('wrong')", 1),
        ("import sys; sys.exit('no')", 1),
        ("raise SystemExit(None)", 0),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import os; os._exit(5)", 5),
    ],
)
def test_its_status_is_that_of_an_executed_one(code: str, status: int, tmp_path: Path) -> None:
    done = warm.run([sys.executable, "-c", code], cwd=tmp_path, env=dict(os.environ))
    executed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == executed.returncode == status
    assert done.stderr.splitlines()[-1:] == executed.stderr.splitlines()[-1:]


def test_modules_are_those_of_its_own_paths(tmp_path: Path) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "found.py").write_text(f"print('{name}')")
        (tmp_path / name / "script.py").write_text("import found, sys; print(sys.argv, __name__)")
    command = [sys.executable, str(tmp_path / "own" / "script.py"), "x"]
    environment = {"PYTHONPATH": str(tmp_path / "other")}
    done = warm.run(command, cwd=tmp_path, env=environment)
    assert done.stdout.splitlines() == ["own", f"{[command[1], 'x']} __main__"]
    assert warm.run([sys.executable, "-m", "found"], cwd=tmp_path, env=environment).stdout == "other\n"


def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run([sys.executable, "-c", "import time; time.sleep(60)"], cwd=tmp_path, env={}, timeout=0.5)
    assert left_behind(tmp_path) == []


def test_what_it_forked_is_found_while_it_lives(tmp_path: Path) -> None:
    code = "import os, time; from pathlib import Path; os.fork() or Path('child').touch(); time.sleep(60)"
    with start(tmp_path, code) as process:
        wait_for((tmp_path / "child").exists)
        found = working_in(tmp_path)
        assert process.pid in found
        assert len(found) == 2
        process.kill()
        process.wait()
        (child,) = working_in(tmp_path)
        assert left_behind(tmp_path, patience=0.1) == [child]
        os.kill(child, signal.SIGKILL)
    assert left_behind(tmp_path) == []


def test_random_numbers_are_its_own(tmp_path: Path) -> None:
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), float(torch.rand(())))"
    drawn = [warm.run([sys.executable, "-c", code], cwd=tmp_path, env={}).stdout.split() for _ in range(2)]
    assert all(one != other for one, other in zip(*drawn, strict=True))


def test_other_programs_are_executed(tmp_path: Path) -> None:
    done = warm.run(["pwd"], cwd=tmp_path, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n")
