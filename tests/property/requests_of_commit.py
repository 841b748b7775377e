"""The seed of this commit's requests: each commit draws others."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """The hash of the commit, shortened; ``0`` outside of a clone, or without git."""
    asked = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return "0"
    return found.stdout.strip() or "0"
