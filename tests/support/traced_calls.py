"""Which files of the package call which, in the processes of a command and in the ranks that they fork."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType

_PACKAGE = f"{Path(__file__).resolve().parents[2] / 'runner'}{os.sep}"
_ENVIRONMENT = "FILE_OF_TRACED_CALLS"


def calls_of(words: Sequence[str], folder: Path) -> set[tuple[str, str]]:
    """Run ``runner`` with these words in a folder.

    Returns:
        pairs of files within the package: the first has called a function of the second, if need be through others'
        code. What imports run does not count.
    """
    (folder / "sitecustomize.py").write_text("import traced_calls\ntraced_calls.note_calls()\n", encoding="utf-8")
    paths = [str(folder), str(Path(__file__).parent), str(Path(_PACKAGE).parent), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(paths), _ENVIRONMENT: str(folder / "calls")}
    command = [sys.executable, "-m", "runner", *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = (folder / "calls").read_text(encoding="utf-8").splitlines()
    return {(caller, called) for caller, called in map(str.split, lines)}


def note_calls() -> None:
    """Write each pair of files to a file from now on, in all threads of this process and of its forks."""
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        called = frame.f_code.co_filename
        if event != "call" or not called.startswith(_PACKAGE) or not _is_function(frame.f_code):
            return
        caller = frame.f_back
        while caller is not None and not _is_another(caller.f_code.co_filename, called):
            caller = caller.f_back
        if caller is None or not (_is_function(caller.f_code) or caller.f_globals["__name__"] == "__main__"):
            return
        pair = caller.f_code.co_filename.removeprefix(_PACKAGE), called.removeprefix(_PACKAGE)
        if pair not in seen:
            seen.add(pair)
            handle = os.open(os.environ[_ENVIRONMENT], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(handle, f"{pair[0]} {pair[1]}\n".encode())
            os.close(handle)

    sys.setprofile(note)
    threading.setprofile(note)


def _is_another(file: str, called: str) -> bool:
    """Whether a file is one of the package, but not the called one."""
    return file != called and file.startswith(_PACKAGE)


def _is_function(code: CodeType) -> bool:
    """Whether it is no body of a module or class, which an import runs."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED)
