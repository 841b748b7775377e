"""``python -m runner`` is the command ``runner``."""

from __future__ import annotations

import sys

from runner.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
