"""The whole command that continues a run or a sweep, as it can be typed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from runner.errors import override_word

__all__ = ["command_that_continues", "short_path"]

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
    return shlex.join(
        [*started, *kept, override_word("run_dir", short_path(run_dir)), *(() if is_sweep else ("resume=auto",))]
    )


def short_path(path: Path) -> Path:
    """The path as people type it: relative if it is below the working directory."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
