"""The files of tests that ``-m "not slow"`` leaves out because they take long, by what they took in one run of all.

``python tests/support/slow_tests.py FILE`` writes the list anew from what ``pytest --junitxml=FILE`` has measured on a
machine that does nothing else: so many files stay, those with the shortest tests, that they take two minutes together.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

__all__ = ["LIST", "slow_files"]

LIST = Path(__file__).with_name("slow_tests.txt")
"""One file per line, below ``tests``."""

_SECONDS = 120.0  # of those that stay


def slow_files() -> frozenset[str]:
    """The files that are left out, below ``tests``."""
    return frozenset(LIST.read_text(encoding="utf-8").split())


def _slowest(measured: Path, seconds: float) -> list[str]:
    """The files with the longest tests, in the mean, without those that take so many seconds together."""
    taken = defaultdict[str, list[float]](list)
    for case in ElementTree.parse(measured).iter("testcase"):
        module, _, _ = str(case.get("classname")).removeprefix("tests.").partition(".Test")  # the class of a test
        taken[f"{module.replace('.', '/')}.py"].append(float(str(case.get("time"))))
    so_far, slow = 0.0, []
    for file in sorted(taken, key=lambda file: sum(taken[file]) / len(taken[file])):
        so_far += sum(taken[file])
        if so_far > seconds:
            slow.append(file)
    return sorted(slow)


if __name__ == "__main__":
    file, *limit = sys.argv[1:]
    LIST.write_text("\n".join(_slowest(Path(file), float(limit[0]) if limit else _SECONDS)) + "\n", encoding="utf-8")
