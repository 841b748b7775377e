"""The whole command that continues a run or a sweep, as it can be typed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

__all__ = ["command_that_continues", "run_dir_word", "short_path"]

_UNQUOTED = re.compile(r"[\w.+-]*/[\w./+-]*|[a-z][\w.+-]*", re.ASCII | re.IGNORECASE)  # a text in Hydra's grammar
_NO_TEXT = ("null", "true", "false", "nan", "inf")
_MODULE = ("runner", "__main__.py")  # the end of the path that Python runs for python -m runner


def command_that_continues(command: str, run_dir: Path) -> str:
    """The whole command that continues what ``command`` has begun in ``run_dir``.

    A sweep (``-m``) goes on wherever it is started again in its directory; a run needs ``resume=auto``.
    """
    program, *words = shlex.split(command)
    is_sweep = "-m" in words
    left_out = ("run_dir=",) if is_sweep else ("run_dir=", "resume=")
    kept = [word for word in words if not word.lstrip("+").startswith(left_out)]
    started = ["python", "-m", program] if Path(sys.argv[0]).parts[-2:] == _MODULE else [program]
    return shlex.join([*started, *kept, run_dir_word(short_path(run_dir)), *(() if is_sweep else ("resume=auto",))])


def run_dir_word(run_dir: Path | str) -> str:
    """The override that names a directory, with Hydra's quotes where its grammar would read something else."""
    text = str(run_dir)
    if _UNQUOTED.fullmatch(text) and text.lower() not in _NO_TEXT:
        return f"run_dir={text}"
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    ending = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'run_dir="{ending}"'


def short_path(path: Path) -> Path:
    """The path as people type it: relative if it is below the working directory."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
